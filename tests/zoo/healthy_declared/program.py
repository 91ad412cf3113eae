"""A library of its own, through a file that all ranks map, beside torch.distributed and in a thread of its own; both are uneven."""

import mmap
import os
import struct
import threading
import time

import earlier_calls
import torch
import torch.distributed as dist

import hangwatch


class Board:
    """A barrier for the ranks of one host: each counts its arrivals in shared memory, and waits until all have come as far."""

    def __init__(self, path, rank, world_size):
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8 * world_size)
        self._rank, self._world_size = rank, world_size

    def barrier(self):
        with hangwatch.collective("barrier", "board"):
            (arrived,) = struct.unpack_from("q", self._memory, 8 * self._rank)
            struct.pack_into("q", self._memory, 8 * self._rank, arrived + 1)
            while min(struct.unpack_from(f"{self._world_size}q", self._memory)) <= arrived:
                time.sleep(0.001)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    path = f"/dev/shm/board-{os.environ['MASTER_PORT']}"
    if rank == 0:
        with open(path, "wb") as file:
            file.truncate(8 * world_size)
    dist.barrier()
    board = Board(path, rank, world_size)
    dist.barrier()
    if rank == 0:
        os.unlink(path)

    def meet():
        for _ in range(earlier_calls.count(1 / 4)):
            board.barrier()
        for step in range(20):
            time.sleep(1.5 if step == 10 and rank == 2 else 0.02 * rank)
            board.barrier()

    beside = threading.Thread(target=meet)
    beside.start()
    pair = tuple(sorted((rank, rank ^ 1)))
    earlier_calls.make(share=3 / 4)
    for step in range(20):
        work = dist.all_reduce(torch.ones(64), async_op=True)
        with hangwatch.collective("swap", ranks=pair):
            time.sleep(0.01)
        work.wait()
        if step == 15 and rank == 1:
            time.sleep(2.0)
    beside.join()
    time.sleep(6.0)  # longer than the limit in which a hang would be found: nothing is under way
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
