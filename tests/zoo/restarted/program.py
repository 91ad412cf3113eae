"""Rank 1 fails in the first attempt; the launcher starts all ranks again, and the second attempt ends well."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def load_shard(rank):
    if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        raise ConnectionError("storage is not there yet")  # PLANTED


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    # The attempts share the launcher's store: under one prefix, gloo would find the addresses of the attempt before.
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    earlier_calls.make()
    dist.all_reduce(torch.ones(8))
    load_shard(rank)
    for _ in range(20):
        dist.all_reduce(torch.ones(64))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
