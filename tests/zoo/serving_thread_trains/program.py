"""Like an actor: the main thread makes the group and then answers requests, some every second; a thread that it started trains. On rank 1 the thread waits for a reply that never comes, before its first call.

No call comes before the fault: rank 1 is to make none at all.
"""

import os
import queue
import threading
import time

import torch
import torch.distributed as dist


def get_reply(replies):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    return replies.get()  # PLANTED


def train(rank):
    if rank == 1:
        get_reply(queue.Queue())
    for _ in range(10):
        dist.all_reduce(torch.ones(64))


def serve_until(thread):
    while thread.is_alive():
        time.sleep(0.5)
        sum(range(10_000))


def main():
    dist.init_process_group("gloo")
    thread = threading.Thread(target=train, args=(dist.get_rank(),))
    thread.start()
    serve_until(thread)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
