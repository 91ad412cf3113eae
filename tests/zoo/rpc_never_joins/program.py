"""Rank 1 loads its model before init_rpc and waits for a file lock; its peers wait in init_rpc.

No call comes before the fault: nobody has a process group yet.
"""

import fcntl
import os

import torch.distributed.rpc as rpc


def load_model():
    with open("model.lock", "w") as first, open("model.lock", "w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        fcntl.flock(second, fcntl.LOCK_EX)  # PLANTED


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 1:
        load_model()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    rpc.shutdown()


if __name__ == "__main__":
    main()
