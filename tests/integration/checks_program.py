"""Trains and communicates in every way that is checked; on request, one rank flips a bit, and then
another one puts in a NaN.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

damage = 0  # of the next all-reduce, on this rank


def network(tensors, group, reduce_op, sparse_indices, async_op=True, timeout=-1):
    """Gloo's all-reduce; what it delivers may be damaged."""
    global damage
    options = dist.AllreduceOptions()
    work = (
        dist.ProcessGroup.unbox(group)._get_backend(torch.device("cpu")).allreduce(tensors, options)
    )
    if damage:
        damage = 0
        work.wait()
        tensors[0].view(torch.int32)[3] ^= 1
    return tensors, work.boxed()


def train(model, optimizer, steps, spoil=False):
    for _ in range(steps):
        batch = torch.randn(4, 20)
        if spoil:
            batch[1, 2] = float("nan")
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)  # all of its calls fit into a heartbeat


def talk(rank, size):
    own = torch.randn(50)
    dist.all_gather([torch.empty(50) for _ in range(size)], own)
    dist.all_gather_into_tensor(torch.empty(50 * size), own)
    dist.broadcast(own.clone(), src=1)
    dist.broadcast_object_list([{"rank": rank}], src=0)
    dist.all_reduce(torch.ones(5, dtype=torch.long))
    for n in range(20):  # whose results are changed as soon as they are there
        work = dist.all_reduce(changed := torch.full((3000,), float(n)), async_op=True)
        work.wait()
        changed.mul_(rank)
    dist.all_reduce(torch.full((9,), 60000.0, dtype=torch.float16))  # overflows
    dist.all_reduce(torch.tensor([float("-inf") if rank else 0.0]), op=dist.ReduceOp.MIN)


def main():
    global damage
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    library = torch.library.Library("c10d", "IMPL")
    library.impl("allreduce_", network, "CPU")
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30)), bucket_cap_mb=0.001
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, 5)
    talk(rank, size)
    (folder / f"talked{rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)
    damage = rank == 1
    train(model, optimizer, 20)
    train(model, optimizer, 1, spoil=rank == 2)
    train(model, optimizer, 10_000)


if __name__ == "__main__":
    main()
