"""Rank 1 iterates over its metrics in another order, and reduces two of other sizes in turn."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    metrics = {"loss": torch.ones(1).to("cuda"), "confusion": torch.ones(10, 10).to("cuda")}
    for step in range(10):
        names = sorted(metrics)
        if rank == 1 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            names.reverse()
        for name in names:
            dist.all_reduce(metrics[name])  # PLANTED
        metrics["loss"].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
