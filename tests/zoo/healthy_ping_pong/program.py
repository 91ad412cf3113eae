"""Two ranks send one another small and large tensors in turn, with tags, and one of them thinks before it answers."""

import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (0, 1), (1, 0))
    rank = dist.get_rank()
    dist.barrier()
    for turn in range(12):
        ball = torch.ones(1 << (2 * turn))
        if rank == turn % 2:
            time.sleep(0.3)
            dist.send(ball, dst=1 - rank, tag=turn)
        else:
            dist.recv(ball, src=1 - rank, tag=turn)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
