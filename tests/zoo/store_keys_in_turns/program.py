"""Each rank reads in its turn, which the rank before it gives by a key of the store. Rank 1 has its turn and reads from an empty pipe."""

import os
import tempfile

import earlier_calls
import torch
import torch.distributed as dist


def read_shard():
    path = os.path.join(tempfile.mkdtemp(dir="."), "shard")
    os.mkfifo(path)
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    with open(path, "rb") as pipe:  # PLANTED
        return pipe.read()


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.all_reduce(torch.ones(8))
    if rank:
        store.get(f"turn{rank}")
    if rank == 1:
        read_shard()
    store.set(f"turn{rank + 1}", "1")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
