"""Rank 2 sleeps in the kernel, uninterruptibly: the child that it starts waits for a pipe to be opened before it runs."""

import os
import tempfile

import earlier_calls
import torch
import torch.distributed as dist


def start_compressor():
    pipe = os.path.join(tempfile.mkdtemp(dir="."), "input")
    os.mkfifo(pipe)
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, pipe, os.O_RDONLY, 0)])  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        if rank == 2 and step == 5:
            start_compressor()
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
