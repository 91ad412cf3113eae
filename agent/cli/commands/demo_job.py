"""The training script of `hangwatch demo`: data-parallel training in which a data loader hangs.

It does not use hangwatch. Rank 2 waits for a batch that never arrives; the others wait in all_reduce
for rank 2.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

Batch = tuple[torch.Tensor, torch.Tensor]

GOOD_STEPS = 12
BATCH_SIZE = 32


class Shards:
    """A thread that prepares batches ahead of their use, as data loaders do."""

    def __init__(self, rank: int, batch_count: int | None) -> None:
        self._ready: queue.Queue[Batch] = queue.Queue(maxsize=2)
        threading.Thread(
            target=self._fill_queue, args=(rank, batch_count), name="shards", daemon=True
        ).start()

    def _fill_queue(self, rank: int, batch_count: int | None) -> None:
        generator = torch.Generator().manual_seed(rank)
        prepared = 0
        # The fault: one rank's shard is shorter, and its reader does not learn where it ends.
        while batch_count is None or prepared < batch_count:
            inputs = torch.randn(BATCH_SIZE, 64, generator=generator)
            self._ready.put((inputs, inputs.sum(dim=1, keepdim=True)))
            prepared += 1

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.load_batch()

    def load_batch(self) -> Batch:
        return self._ready.get()  # planted: rank 2 waits here forever


def train(rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shards = Shards(rank, batch_count=GOOD_STEPS if rank == 2 else None)
    for step, (inputs, targets) in enumerate(shards, start=1):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / dist.get_world_size():.3f}", flush=True)
        time.sleep(0.1)


def main() -> None:
    dist.init_process_group("gloo")
    train(int(os.environ["RANK"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
