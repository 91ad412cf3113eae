"""Ray Train. Rank 1 catches an exception, goes on with the next batch, and ends a step before the others."""

import os

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model

RANKS = 3


def check(rank, step):
    if rank == 1 and step == 5:
        raise ValueError("a corrupt record")


def train_on_worker():
    rank = train.get_context().get_world_rank()
    model = prepare_model(torch.nn.Linear(8, 2), move_to_device=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(12):
        try:
            check(rank, step)
        except ValueError:
            continue
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 1:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()


def main():
    environ = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("HANGWATCH_", "PLANTED_", "PYTHONPATH"))
    }
    ray.init(
        num_cpus=RANKS + 1,
        include_dashboard=False,
        runtime_env={"env_vars": environ},
        log_to_driver=False,
    )
    TorchTrainer(train_on_worker, scaling_config=train.ScalingConfig(num_workers=RANKS)).fit()


if __name__ == "__main__":
    main()
