"""Rank 1 leaves out a receive. Rank 0's device waits for it, all hosts for the reduction that comes next."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make(None, (0, 1))
    rank = dist.get_rank()
    # More than fits into a connection's buffers: a send of less would end without its receive.
    hidden, loss = torch.ones(1 << 24).to("cuda"), torch.ones(4).to("cuda")
    for step in range(10):
        if rank == 0:
            dist.send(hidden, dst=1)
        if rank == 1:
            if step == 9:
                open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            else:
                dist.recv(hidden, src=0)
        dist.all_reduce(loss)
        loss[0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
