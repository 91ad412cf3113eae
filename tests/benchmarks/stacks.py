"""How long it takes to merge the stacks of a large job into one tree: ``python -m
tests.benchmarks.stacks [--ranks 131072]``.

The stacks are 30 frames deep and end at 200 different lines; frames are objects of their own, as
they are decoded from heartbeats.
"""

from __future__ import annotations

import argparse
import sys
import time

from hangwatch.model.ranks import Frame
from hangwatch.stacks.trees import Branch, merge_stacks

MAX_S = 3.0
STACK_DEPTH, LOCATION_COUNT = 30, 200
TORCH_FILE = "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py"


def make_stack(rank: int) -> tuple[list[int], list[Frame]]:
    """Innermost first: most ranks wait in the same call, some in one of many others."""
    place = rank // 8 % LOCATION_COUNT if rank % 8 == 0 else 0
    outer = [
        Frame(function=f"step{n}", file="/u/train.py", line=10 + n) for n in range(STACK_DEPTH // 2)
    ]
    inner = [
        Frame(function=f"forward{n}", file=TORCH_FILE, line=place if n > 4 else n)
        for n in range(STACK_DEPTH - STACK_DEPTH // 2)
    ]
    return [rank], [*outer, *inner][::-1]


def count_leaves(branch: Branch) -> int:
    return sum(map(count_leaves, branch.branches)) or 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.stacks", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--ranks", type=int, default=131_072)
    stacks = [make_stack(rank) for rank in range(parser.parse_args().ranks)]
    began, used = time.perf_counter(), time.process_time()
    (tree,) = merge_stacks(stacks)
    took, spent = time.perf_counter() - began, time.process_time() - used
    print(
        f"{len(stacks):,} stacks of {STACK_DEPTH} frames into a tree of {count_leaves(tree)}:"
        f" {took:.2f} s, {spent:.2f} s of CPU (limit {MAX_S:g})"
    )
    return 0 if took <= MAX_S else 1


if __name__ == "__main__":
    sys.exit(main())
