"""torch's own pipelining: three stages, eight micro-batches, one forward and one backward in turn."""

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (0, 1), (1, 2), (2, 1), (1, 0))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layer = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    stage = PipelineStage(layer, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for _ in range(6):
        if rank == 0:
            schedule.step(torch.randn(32, 16))
        elif rank == world_size - 1:
            schedule.step(target=torch.zeros(32, 16))
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
