"""As deadlock_two_groups, but no host waits between the two calls: all hosts made them, and the devices wait for each other."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    tensor, expert = dist.new_group([0, 1]), dist.new_group([0, 1])
    earlier_calls.make(None, tensor, expert)
    activations, tokens, loss = torch.ones(32).to("cuda"), torch.ones(16).to("cuda"), torch.ones(4).to("cuda")
    for step in range(10):
        dist.all_reduce(loss)
        loss[0].item()
        if rank > 1:
            continue
        first, second = (tensor, activations), (expert, tokens)
        if step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            if rank == 1:
                first, second = second, first
        for group, data in (first, second):
            dist.all_reduce(data, group=group)  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
