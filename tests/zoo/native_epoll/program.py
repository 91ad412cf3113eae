"""Rank 2 calls a native library that waits for events which never come. It releases the GIL meanwhile. Its
epoll_wait must not end before: a process that is stopped for a moment finds it ended with EINTR."""

import ctypes
import os

import earlier_calls
import torch
import torch.distributed as dist

library = ctypes.CDLL(None)


def wait_for_event():
    events = ctypes.create_string_buffer(12)
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    library.epoll_wait(library.epoll_create1(0), events, 1, -1)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for step in range(10):
        if dist.get_rank() == 2 and step == 5:
            wait_for_event()
        dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
