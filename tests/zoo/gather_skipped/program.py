"""Rank 2 leaves out a gather of metrics. Its other senders do not wait for it: they are a call further than the root."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def log_metrics(step):
    parts = [torch.zeros(4) for _ in range(4)] if dist.get_rank() == 0 else None
    dist.gather(torch.full((4,), float(step)), parts, dst=0)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for step in range(6):
        if dist.get_rank() == 2 and step == 4:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        else:
            log_metrics(step)
        dist.barrier()  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
