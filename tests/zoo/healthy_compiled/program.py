"""A compiled step with functional collectives; each rank compiles at a time of its own."""

import time

import earlier_calls
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()

    @torch.compile(backend="aot_eager")
    def step(x, weight):
        hidden = funcol.all_reduce(x @ weight, "sum", dist.group.WORLD)
        return funcol.all_gather_tensor(hidden.relu(), 0, dist.group.WORLD).sum()

    time.sleep(1.5 * dist.get_rank())
    for turn in range(10):
        step(torch.ones(4 if turn < 5 else 6, 16), torch.ones(16, 16))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
