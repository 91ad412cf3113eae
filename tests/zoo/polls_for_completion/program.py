"""All ranks ask in a loop whether a call is complete; rank 0 does not make it, for it waits for its queue."""

import os
import queue
import time

import earlier_calls
import torch
import torch.distributed as dist


def finished(work):
    while not work.is_completed():
        time.sleep(0.01)
    work.wait()


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    inbox = queue.Queue()
    for step in range(20):
        if step == 10 and rank == 0:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            inbox.get()  # PLANTED
        finished(dist.all_reduce(torch.ones(8), async_op=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
