"""Rank 0 alone runs its model on tensors without data, as for counting memory and operations, before all train."""

import earlier_calls
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode


def forward(x):
    hidden = x * 2
    dist.all_reduce(hidden)
    gathered = [torch.empty_like(hidden) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, hidden)
    return torch.cat(gathered)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    forward(torch.ones(4))
    if dist.get_rank() == 0:
        with FakeTensorMode():
            print(forward(torch.empty(8)).shape)
        with torch.device("meta"):
            print(forward(torch.empty(16)).shape)
    for step in range(40):
        forward(torch.ones(1 + step % 7))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
