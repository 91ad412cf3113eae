"""One step rank 1 gathers its statistics where the others add theirs up."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        statistics = torch.ones(64).to("cuda")
        if rank == 1 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            every = torch.ones(64 * dist.get_world_size()).to("cuda")
            dist.all_gather_into_tensor(every, statistics)  # PLANTED
        else:
            dist.all_reduce(statistics)
        statistics[0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
