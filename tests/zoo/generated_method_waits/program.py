"""Rank 0 waits in a method that a library made by exec, as for classes that are described by a schema."""

import os
import queue

import earlier_calls
import torch
import torch.distributed as dist

SOURCE = "def read(self):\n    return self.rows.get()\n"
MADE = {}
exec(SOURCE, MADE)


class Table:
    read = MADE["read"]

    def __init__(self):
        self.rows = queue.Queue()


def load_rows(table):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    return table.read()  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for step in range(5):
        if dist.get_rank() == 0 and step == 3:
            load_rows(Table())
        dist.all_reduce(torch.ones(8))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
