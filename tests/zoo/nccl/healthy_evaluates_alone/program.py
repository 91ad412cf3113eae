"""Rank 0 evaluates for 8 seconds on its host, while the others wait for its broadcast."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def evaluate():
    end = time.monotonic() + 8
    score = 0.0
    while time.monotonic() < end:
        score += sum(number % 7 for number in range(20_000))
        time.sleep(0.02)
    return score


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    loss = torch.ones(64).to("cuda")
    for step in range(20):
        dist.all_reduce(loss)
        if step == 10:
            score = torch.tensor([evaluate() if rank == 0 else 0.0]).to("cuda")
            dist.broadcast(score, src=0)
            score.item()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
