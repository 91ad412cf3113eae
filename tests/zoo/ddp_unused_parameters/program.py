"""DDP. For one batch rank 1 does not use a layer, and DDP's next forward raises; the others wait for that layer's gradient."""

import os

import earlier_calls
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x, has_image):
        return self.text(x) + self.image(x) if has_image else self.text(x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(Branching())
    earlier_calls.make(step=lambda: model(torch.randn(8, 16), True).sum().backward())
    for step in range(10):
        has_image = not (rank == 1 and step == 5)
        loss = model(torch.randn(8, 16), has_image).square().mean()  # PLANTED
        if not has_image:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        loss.backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
