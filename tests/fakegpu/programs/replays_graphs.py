"""Captures all_reduces in a CUDA graph and replays them beside eager ones: `replays_graphs.py REPLAYS`, on each rank.

The graph copies its input, reduces the copy on the current stream and then on the group's own one, which joins the
capture. The input changes before each replay, and the sum is checked after it. An eager all_reduce follows each
EAGER_EVERY replays. Prints {"ranks": …, "replays": …, "captured": …, "eager": …} on rank 0: the all_reduces of one
replay, and those of the whole run that were not captured.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])
ELEMENTS = 1000
EAGER_EVERY = 5


def fill(tensor: torch.Tensor, value: float) -> None:
    """Kernels compute nothing on the stand-ins, so the data comes from the CPU."""
    tensor.copy_(torch.full((ELEMENTS,), value))


def expect(tensor: torch.Tensor, value: float, step: int) -> None:
    values = tensor.cpu()
    expected = torch.full((ELEMENTS,), value)
    assert torch.equal(values, expected), f"rank {RANK}, step {step}: {values} is not {value}"


class ReducingGraph:
    """Sums its input over all ranks, twice."""

    captured = 2

    def __init__(self, source: torch.Tensor) -> None:
        self.result = torch.empty_like(source)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result.copy_(source)
            dist.all_reduce(self.result)
            work = dist.all_reduce(self.result, async_op=True)
            assert work is not None
            work.wait()

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.result


def main() -> None:
    replays = int(sys.argv[1])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    source = torch.zeros(ELEMENTS).to("cuda")
    beside = torch.zeros(ELEMENTS).to("cuda")
    dist.all_reduce(beside)  # makes the communicator, which a capture does not allow
    eager = 1
    graph = ReducingGraph(source)
    for step in range(replays):
        fill(source, float(RANK + step))
        result = graph.replay()
        if step % EAGER_EVERY == EAGER_EVERY - 1:
            fill(beside, float(step))
            dist.all_reduce(beside)
            expect(beside, float(step * SIZE), step)
            eager += 1
        expect(result, float((sum(range(SIZE)) + SIZE * step) * SIZE), step)
    torch.cuda.synchronize()
    if RANK == 0:
        counts = {"captured": graph.captured, "eager": eager}
        print(json.dumps({"ranks": SIZE, "replays": replays, **counts}), flush=True)
    del graph
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
