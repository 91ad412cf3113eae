"""Rank 1 fails in the first attempt; the launcher starts all anew, and the second attempt ends well."""

import os

import torch
import torch.distributed as dist


def load_shard(rank):
    if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        raise ConnectionError("storage is not there yet")  # PLANTED


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(8))
    load_shard(rank)
    for _ in range(20):
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
