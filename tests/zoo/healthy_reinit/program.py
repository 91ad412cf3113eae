"""The process group is destroyed and made again, as between two phases of a training."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for phase in range(3):
        # Under one prefix, gloo would find the addresses of the phase before.
        dist.init_process_group("gloo", store=dist.PrefixStore(f"phase{phase}", store), rank=rank, world_size=world_size)
        first = dist.new_group([0])
        earlier_calls.make(None, first, share=1 / 3)
        for _ in range(5 + phase):
            dist.all_reduce(torch.ones(64))
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=first)
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(0.5)


if __name__ == "__main__":
    main()
