"""A ring of batches. Rank 1 leaves its receive out of one; the operations of one batch have no order among themselves."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    earlier_calls.make()
    out, into = torch.ones(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda")
    for step in range(20):
        operations = [dist.P2POp(dist.isend, out, (rank + 1) % size)]
        if rank == 1 and step == 8:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        else:
            operations.append(dist.P2POp(dist.irecv, into, (rank - 1) % size))
        for work in dist.batch_isend_irecv(operations):  # PLANTED
            work.wait()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
