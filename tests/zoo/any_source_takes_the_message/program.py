"""A receive of rank 0 from any source takes rank 1's only message; its next one, from rank 1 by name, waits for one that never comes."""

import os
import threading

import earlier_calls
import torch
import torch.distributed as dist


def prepare_second_message():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    threading.Event().wait()  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (1, 0))
    if dist.get_rank() == 0:
        dist.recv(torch.ones(4))
        dist.recv(torch.ones(4), src=1)
    else:
        dist.send(torch.ones(4), dst=0)
        prepare_second_message()
        dist.send(torch.ones(4), dst=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
