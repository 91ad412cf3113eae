"""A ring of batches, with a reduction after each. Rank 1 leaves its receive out of one: rank 0's batch does not complete."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    earlier_calls.make()
    # More than the buffers of NCCL hold, so that a send without its receive does not complete.
    out, into = torch.ones(24 << 20, device="cuda"), torch.ones(24 << 20, device="cuda")
    for step in range(20):
        operations = [dist.P2POp(dist.isend, out, (rank + 1) % size)]
        if rank == 1 and step == 8:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        else:
            operations.append(dist.P2POp(dist.irecv, into, (rank - 1) % size))
        for work in dist.batch_isend_irecv(operations):  # PLANTED
            work.wait()
        dist.all_reduce(torch.ones(64, device="cuda"))
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
