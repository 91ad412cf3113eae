"""A kernel on rank 1 never ends, before a call of its pair. The other pair completes its own and waits in the world's."""

import os

import device_faults
import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    earlier_calls.make(None, pairs[rank // 2])
    activations, loss = torch.ones(32).to("cuda"), torch.ones(64).to("cuda")
    for step in range(20):
        if rank == 1 and step == 10:
            device_faults.launch_endless_kernel()
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.all_reduce(activations, group=pairs[rank // 2])
        dist.all_reduce(loss)
        loss[0].item()  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
