"""fully_shard in bfloat16, then half precision under loss scaling whose first scales are far too large, every call looked at."""

import os
import time

os.environ["HANGWATCH_CHECKS"] = "replicas,nonfinite,values"
os.environ["HANGWATCH_CHECK_EVERY"] = "1"

import earlier_calls
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def layers():
    return torch.nn.Sequential(torch.nn.Linear(37, 91), torch.nn.ReLU(), torch.nn.Linear(91, 37))


def train(model, optimizer, steps, scaler):
    for _ in range(steps):
        with torch.autocast("cpu", torch.float16, enabled=scaler.is_enabled()):
            loss = model(torch.randn(8, 37)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        time.sleep(0.01)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    torch.manual_seed(dist.get_rank())
    model = layers()
    for layer in model:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model)
    train(model, torch.optim.AdamW(model.parameters()), 30, torch.amp.GradScaler("cpu", enabled=False))
    model = DistributedDataParallel(layers())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32, growth_interval=5)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), 60, scaler)
    half = torch.full((100,), 40000.0, dtype=torch.float16)
    dist.all_reduce(half)
    time.sleep(1.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
