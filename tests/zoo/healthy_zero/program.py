"""DDP with an optimizer whose state is sharded: each rank broadcasts the parameters that it updates."""

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(5))))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    for _ in range(15):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
