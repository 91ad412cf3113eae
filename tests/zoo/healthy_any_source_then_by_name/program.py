"""Rank 0 receives from any source what ranks 1 and 2 send, and then from each by name. Rank 2 computes before its second one."""

import time

import earlier_calls
import torch
import torch.distributed as dist


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (1, 0), (2, 0))
    rank = dist.get_rank()
    for step in range(5):
        if rank == 0:
            for _ in range(2):
                dist.recv(torch.ones(4))
            for source in (1, 2):
                dist.recv(torch.ones(4), src=source, tag=9)
        elif rank < 3:
            dist.send(torch.ones(4), dst=0)
            if rank == 2 and step == 3:
                compute(8)
            dist.send(torch.ones(4), dst=0, tag=9)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
