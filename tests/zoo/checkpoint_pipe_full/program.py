"""Rank 0 saves its checkpoint into a pipe to an uploader that no longer reads. The others are in the next step."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def save(model, writer):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    torch.save(model, writer)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    model = {"weight": torch.zeros(1 << 20)}
    uploader, writer = os.pipe()
    for step in range(10):
        dist.all_reduce(torch.ones(64))
        if step == 5 and dist.get_rank() == 0:
            with open(writer, "wb", closefd=False) as file:
                save(model, file)
    os.close(uploader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
