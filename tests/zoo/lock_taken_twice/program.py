"""Rank 1's metrics take their lock a second time while they hold it."""

import os
import threading

import earlier_calls
import torch
import torch.distributed as dist


class Metrics:
    def __init__(self):
        self.lock = threading.Lock()
        self.values = []

    def flush(self):
        with self.lock:  # PLANTED
            self.values.clear()

    def add(self, value):
        with self.lock:
            self.values.append(value)
            if len(self.values) == 6:
                open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
                self.flush()


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    metrics = Metrics()
    for _ in range(10):
        loss = torch.ones(1)
        if rank == 1:
            metrics.add(loss.item())
        dist.all_reduce(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
