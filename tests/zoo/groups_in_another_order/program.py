"""Rank 1 builds its process groups in the other order, so that nobody's groups find their members. All stacks look alike."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def build_groups(rank):
    layout = {"experts": [0, 1, 2], "shared": [1, 2, 3]}
    names = sorted(layout, reverse=rank == 1)
    groups = {}
    for name in names:
        if rank == 1:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        groups[name] = dist.new_group(layout[name])  # PLANTED
    return groups


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    groups = build_groups(rank)
    if rank in (1, 2, 3):
        dist.all_reduce(torch.ones(64), group=groups["shared"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
