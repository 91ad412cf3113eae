"""Only rank 0 of two ranks reads a property that broadcasts. Only its stack shows who read it."""

import os

import earlier_calls
import torch
import torch.distributed as dist


class Run:
    @property
    def folder(self):
        path = ["/tmp/run"]
        dist.broadcast_object_list(path, 0)
        return path[0]


def write_header(run):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    print("writing to", run.folder)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for step in range(10):
        if step == 5 and dist.get_rank() == 0:
            write_header(Run())
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
