"""Two ranks that train without end: rank 1 computes in `crunch` for most of each step, and rank 0
waits for it.
"""

import time

import torch
import torch.distributed as dist


def crunch(seconds: float) -> int:
    until, total = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        total += sum(range(200))
    return total


def step(tensor: torch.Tensor, pair: dist.ProcessGroup, number: int) -> None:
    if dist.get_rank() == 1:
        crunch(0.02)
    dist.all_reduce(tensor)
    if number % 4 == 0:
        dist.broadcast(tensor, src=1, group=pair)
    tensor.zero_()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1], group_desc="the pair")
    tensor, number = torch.ones(64), 0
    while True:
        step(tensor, pair, number)
        number += 1


if __name__ == "__main__":
    main()
