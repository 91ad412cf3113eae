"""Rank 2 raises within a with statement, whose end broadcasts a report; its peers are in an all-reduce."""

import contextlib
import os

import earlier_calls
import torch
import torch.distributed as dist


@contextlib.contextmanager
def report_metrics():
    metrics = torch.ones(4)
    try:
        yield metrics
    finally:
        dist.broadcast(metrics, 0)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    with report_metrics() as metrics:
        for step in range(10):
            if dist.get_rank() == 2 and step == 5:
                open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
                metrics[4] = 1
            dist.all_reduce(metrics)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
