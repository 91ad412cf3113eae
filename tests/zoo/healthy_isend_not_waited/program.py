"""Rank 0 starts sends and never waits for them; rank 1 receives them long after."""

import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (0, 1))
    rank = dist.get_rank()
    outbox = [torch.full((1024,), float(n)) for n in range(10)]
    if rank == 0:
        pending = [dist.isend(letter, dst=1) for letter in outbox]
        for _ in range(60):
            time.sleep(0.1)
        assert len(pending) == 10
    else:
        time.sleep(6)
        for letter in outbox:
            dist.recv(letter, src=0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
