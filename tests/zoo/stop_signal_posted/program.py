"""Rank 1 has posted a receive for a signal to stop, as it always does; it waits for a key that nobody sets, and not for that signal."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    stop = dist.irecv(torch.zeros(1), src=0, tag=7) if rank else None
    earlier_calls.make(None, (0, 1))
    for step in range(20):
        if step == 10 and rank == 1:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            store.wait(["data-ready"])  # PLANTED
        dist.all_reduce(torch.ones(8))
    if rank == 0:
        dist.send(torch.ones(1), dst=1, tag=7)
    else:
        stop.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
