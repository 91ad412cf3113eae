"""Rank 1 stops in a debugger that somebody left in the code: it waits for a command at a terminal where nobody sits."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def validate():
    reader, _ = os.pipe()
    os.dup2(reader, 0)
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    breakpoint()  # noqa: T100 - it was left here  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(20):
        loss = torch.ones(8)
        if rank == 1 and step == 10:
            validate()
        dist.all_reduce(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
