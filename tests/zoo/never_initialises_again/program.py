"""All destroy the process group to meet again under another prefix; rank 2 waits for an operator's answer first."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def ask_operator():
    answer, _ = os.pipe()
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    os.read(answer, 1)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for _ in range(6):
        dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 2:
        ask_operator()
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=3)
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
