"""Rank 0 hands out work to whoever asks for it, and receives from any source."""

import time

import earlier_calls
import torch
import torch.distributed as dist


def serve(world_size):
    left, idle = 20, 0
    request = torch.empty(1)
    while idle < world_size - 1:
        asking = dist.recv(request)
        idle += left == 0
        dist.send(torch.tensor([float(left)]), dst=asking)
        left = max(left - 1, 0)


def work(rank):
    job = torch.empty(1)
    while True:
        dist.send(torch.ones(1), dst=0)
        dist.recv(job, src=0)
        if job.item() == 0:
            return
        time.sleep(0.2 * rank)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (1, 0), (0, 1), (2, 0), (0, 2), (3, 0), (0, 3))
    rank = dist.get_rank()
    if rank == 0:
        serve(dist.get_world_size())
    else:
        work(rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
