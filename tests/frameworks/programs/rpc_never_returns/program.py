"""A remote procedure call of rank 0 never returns; the others are in the next collective."""

import os
import time

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc


def serve():
    time.sleep(600)


def fetch_weights():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    return rpc.rpc_sync("worker1", serve, timeout=0)  # PLANTED


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    for step in range(10):
        if rank == 0 and step == 5:
            fetch_weights()
        dist.all_reduce(torch.ones(8))
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
