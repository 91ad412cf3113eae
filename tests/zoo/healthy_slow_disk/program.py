"""Rank 0 writes a checkpoint to a disk that takes 2 MB a second; its peers wait at the barrier."""

import os
import time

import earlier_calls
import torch.distributed as dist


def save(seconds):
    with open("checkpoint", "wb") as file:
        for _ in range(4 * seconds):
            file.write(bytes(500_000))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.25)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    if dist.get_rank() == 0:
        save(14)
        os.remove("checkpoint")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
