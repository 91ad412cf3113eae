"""Rank 1 raises an exception, and the thread that uploads its metrics, and never stops, keeps its process from ending."""

import os
import threading
import time

import earlier_calls
import torch
import torch.distributed as dist


def upload_metrics():
    while True:
        sum(range(3_000_000))
        time.sleep(0.05)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    if dist.get_rank() == 1:
        threading.Thread(target=upload_metrics).start()
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        raise ValueError("the batch is empty")  # PLANTED
    dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
