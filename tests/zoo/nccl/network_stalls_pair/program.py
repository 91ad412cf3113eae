"""The network between ranks 2 and 3 stalls; ranks 0 and 1 wait for them in the world's next call."""

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
        if rank > 1 and step == 10:
            device_faults.stall_network()
            if rank == 2:
                open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.all_reduce(activations, group=pairs[rank // 2])
        dist.all_reduce(loss)
        loss[0].item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
