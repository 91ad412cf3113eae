"""What the comparison of results assumes: gloo's all-reduce gives every rank the same bytes, NaNs
and signed zeros included.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hangwatch.agent.recorder.checks.tensors import compute_checksum

SIZES = (1, 2, 3, 5, 16, 100, 1023, 4096, 65537)
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)


def make_inputs(rank: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(rank)
    made = [
        (torch.randn(size, generator=random) * 10).to(dtype) for size in SIZES for dtype in TYPES
    ]
    for size in SIZES:
        odd = torch.randn(size, generator=random)
        odd.view(torch.int32)[::2] = 0x7FC00001 + rank  # a NaN of its own
        odd[1::3] = -0.0 if rank % 2 else 0.0
        made.append(odd)
    return made


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_all_ranks_get_the_same_bytes(ranks: int) -> None:
    store = torch._C._distributed_c10d.HashStore()

    def run_rank(rank: int) -> list[int | None]:
        # torch's stubs of this class lack its collectives.
        group: Any = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))
        checksums: list[int | None] = []
        for tensor in make_inputs(rank):
            for op in OPS:
                options: Any = dist.AllreduceOptions()
                reduced = tensor.clone()
                options.reduceOp = op
                group.allreduce([reduced], options).wait()
                checksums.append(compute_checksum([reduced]))
        group.barrier().wait()
        return checksums

    with ThreadPoolExecutor(ranks) as pool:
        first, *others = pool.map(run_rank, range(ranks))
    assert len(first) == 252 and None not in first
    assert all(checksums == first for checksums in others)
