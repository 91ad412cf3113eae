"""Rank 0 waits for the signal by which the scheduler announces the end of the allocation, in the wrong place."""

import os
import signal

import earlier_calls
import torch
import torch.distributed as dist


def wait_for_scheduler():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    signal.sigwait({signal.SIGUSR2})  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(20):
        if rank == 0 and step == 12:
            wait_for_scheduler()
        dist.broadcast(torch.ones(8), src=0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
