"""Rank 1 is killed, and its peers' NCCL does not notice: they wait in their next reduction."""

import os
import signal

import earlier_calls
import torch
import torch.distributed as dist


def main():
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    dist.init_process_group("nccl")
    earlier_calls.make()
    loss = torch.ones(64).to("cuda")
    for step in range(100):
        if rank == 1 and step == 30:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(loss)
        loss[0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
