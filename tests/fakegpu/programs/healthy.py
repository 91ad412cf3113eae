"""Runs one kind of communication on all ranks and checks the data: `healthy.py CASE`.

Kernels compute nothing on the stand-ins, so all data comes from the CPU and is compared there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
)


def on_device(values: list[Any] | torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    return tensor.to("cuda")


def expect(actual: torch.Tensor, expected: Any) -> None:
    values = actual.cpu().tolist()
    assert values == expected, f"rank {RANK}: {values} is not {expected}"


def run_collectives() -> None:
    ranks = list(range(SIZE))
    total = sum(ranks)
    for dtype in DTYPES:
        tensor = on_device([RANK, 1], dtype)
        dist.all_reduce(tensor)
        expect(tensor, [total, SIZE])
    operations = {dist.ReduceOp.MAX: SIZE, dist.ReduceOp.MIN: 1, dist.ReduceOp.AVG: (SIZE + 1) / 2}
    for operation, result in operations.items():
        tensor = on_device([RANK + 1.0])
        dist.all_reduce(tensor, op=operation)
        expect(tensor, [float(result)])
    gathered = [on_device([-1, -1]) for _ in ranks]
    dist.all_gather(gathered, on_device([RANK, RANK + 10]))
    for rank, tensor in enumerate(gathered):
        expect(tensor, [rank, rank + 10])
    flat = on_device([0] * SIZE)
    dist.all_gather_into_tensor(flat, on_device([RANK]))
    expect(flat, ranks)
    piece = on_device([0])
    dist.reduce_scatter_tensor(piece, on_device([RANK * 10 + rank for rank in ranks]))
    expect(piece, [total * 10 + RANK * SIZE])
    tensor = on_device([RANK])
    dist.broadcast(tensor, src=SIZE - 1)
    expect(tensor, [SIZE - 1])
    tensor = on_device([RANK])
    dist.reduce(tensor, dst=0)
    if RANK == 0:
        expect(tensor, [total])
    large = torch.arange(700_000) + RANK  # several rounds of the stand-in's buffers
    tensor = on_device(large)
    dist.all_reduce(tensor)
    assert torch.equal(tensor.cpu(), large * SIZE - RANK * SIZE + total)
    dist.barrier()


def run_send_recv() -> None:
    for size in (3, 500_000):
        tensor = on_device(torch.full((size,), float(RANK)))
        if RANK > 0:
            dist.recv(tensor, src=RANK - 1)
            assert tensor.cpu()[-1] == RANK - 1
        if RANK < SIZE - 1:
            dist.send(on_device(torch.full((size,), float(RANK))), dst=RANK + 1)


def run_batched_p2p() -> None:
    left, right = (RANK - 1) % SIZE, (RANK + 1) % SIZE
    from_left, from_right = on_device([-1]), on_device([-1])
    mine = on_device([RANK])
    operations = [
        dist.P2POp(dist.isend, mine, right),
        dist.P2POp(dist.isend, mine, left),
        dist.P2POp(dist.irecv, from_left, left),
        dist.P2POp(dist.irecv, from_right, right),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    expect(from_left, [left])
    expect(from_right, [right])


def run_new_group() -> None:
    first = dist.new_group([0, 1])
    every = dist.new_group(list(range(SIZE)))
    if RANK in (0, 1):
        tensor = on_device([RANK + 1])
        dist.all_reduce(tensor, group=first)
        expect(tensor, [3])
    tensor = on_device([1])
    dist.all_reduce(tensor, group=every)
    expect(tensor, [SIZE])


def run_device_mesh() -> None:
    mesh = init_device_mesh("cuda", (2, SIZE // 2), mesh_dim_names=("outer", "inner"))
    for name in ("outer", "inner"):
        group = mesh[name].get_group()
        tensor = on_device([RANK])
        dist.all_reduce(tensor, group=group)
        expect(tensor, [sum(dist.get_process_group_ranks(group))])


def run_coalescing() -> None:
    tensors = [on_device([RANK, index]) for index in range(3)]
    with _coalescing_manager(
        device=torch.device("cuda", torch.cuda.current_device()), async_ops=True
    ) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for index, tensor in enumerate(tensors):
        expect(tensor, [sum(range(SIZE)), index * SIZE])


def run_functional() -> None:
    group = dist.group.WORLD
    assert group is not None
    reduced = functional.all_reduce(on_device([RANK]), "sum", group)
    expect(reduced, [sum(range(SIZE))])
    gathered = functional.all_gather_tensor(on_device([RANK]), 0, group)
    expect(gathered, list(range(SIZE)))


def run_all_to_all() -> None:
    output = on_device([-1] * SIZE)
    dist.all_to_all_single(output, on_device([RANK * 10 + rank for rank in range(SIZE)]))
    expect(output, [rank * 10 + RANK for rank in range(SIZE)])
    # Uneven: rank r sends r + 1 elements to everybody.
    sizes = [rank + 1 for rank in range(SIZE)]
    output = on_device([-1] * sum(sizes))
    dist.all_to_all_single(output, on_device([RANK] * (RANK + 1) * SIZE), sizes, [RANK + 1] * SIZE)
    expect(output, [rank for rank in range(SIZE) for _ in range(rank + 1)])


def run_objects() -> None:
    gathered: list[Any] = [None] * SIZE
    dist.all_gather_object(gathered, {"rank": RANK})
    assert gathered == [{"rank": rank} for rank in range(SIZE)], gathered


def run_scatter_gather() -> None:
    piece = on_device([-1])
    dist.scatter(
        piece, [on_device([rank * 2]) for rank in range(SIZE)] if RANK == 0 else None, src=0
    )
    expect(piece, [RANK * 2])
    pieces = [on_device([-1]) for _ in range(SIZE)] if RANK == 0 else None
    dist.gather(on_device([RANK]), pieces, dst=0)
    for rank, tensor in enumerate(pieces or []):
        expect(tensor, [rank])


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(
        "cuda"
    )


def run_ddp() -> None:
    model = DistributedDataParallel(make_model(), device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(on_device(torch.rand(4, 32))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


def run_fsdp2() -> None:
    model = make_model()
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(5):
        model(on_device(torch.rand(4, 32))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


def run_split() -> None:
    group = dist.split_group(split_ranks=[[0, 1], list(range(2, SIZE))] if SIZE > 2 else [[0, 1]])
    assert group is not None
    tensor = on_device([RANK])
    dist.all_reduce(tensor, group=group)
    expect(tensor, [1 if RANK < 2 else sum(range(2, SIZE))])


CASES: dict[str, Callable[[], None]] = {
    name.removeprefix("run_"): function
    for name, function in list(globals().items())
    if name.startswith("run_")
}


def main() -> None:
    chosen = sys.argv[1:] or list(CASES)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # With a device id the communicator is created immediately, which splitting needs.
    dist.init_process_group(device_id=device if os.environ.get("EAGER", "1") == "1" else None)
    for name in chosen:
        CASES[name]()
        torch.cuda.synchronize()
        dist.barrier()
        if RANK == 0:
            print("passed", name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
