"""Ranks 0 and 1 wait in the barrier that torch's elastic library builds on a store. Rank 2 waits for a lock that its own thread holds."""

import os
import threading

import earlier_calls
import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier

LOCK = threading.Lock()


def export_weights():
    threading.Thread(target=LOCK.acquire).start()
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    with LOCK:  # PLANTED
        return 1


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for step in range(10):
        dist.all_reduce(torch.ones(64))
        if rank == 2 and step == 5:
            export_weights()
        barrier(store, size, f"export{step}", barrier_timeout=1800)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
