"""The script sets up its environment and replaces itself by a new Python; later rank 0 waits for an answer that nobody types."""

import os
import pty
import sys

import earlier_calls
import torch
import torch.distributed as dist


def main():
    if "SET_UP" not in os.environ:
        os.environ["SET_UP"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(20):
        if step == 10 and rank == 0:
            _, terminal = pty.openpty()
            sys.stdin = os.fdopen(terminal)
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            input("overwrite the checkpoint? ")  # PLANTED
        dist.all_reduce(torch.ones(8))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
