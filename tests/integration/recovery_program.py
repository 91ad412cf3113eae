"""Rank 1 leaves out one all-reduce in the first attempt, and all hang; the second one trains to its
end.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist


def main():
    rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    # The attempts share the launcher's store: under one prefix, gloo would find the addresses of
    # the attempt before.
    store = dist.PrefixStore(attempt, store)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    first, rate = attempt == "0", torch.tensor([0.1])
    for step in range(20):
        gradients = torch.ones(64)
        if not (first and rank == 1 and step == 5):
            dist.all_reduce(gradients)
        else:
            Path(os.environ["PLANTED_AT"]).touch()
        dist.broadcast(rate, src=0)
    if rank == 0:
        print(f"trained to step {step} with {gradients.sum().item():g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
