"""DeepSpeed by its own launcher, on two nodes. The rank of the second one reads from a pipe that nobody writes to."""

import os

import deepspeed
import torch


def read_batch():
    reader, _writer = os.pipe()
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    return os.read(reader, 1)  # PLANTED


def main():
    deepspeed.init_distributed("gloo")
    model = torch.nn.Linear(8, 2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(10):
        if step == 5 and engine.global_rank == 1:
            read_batch()
        loss = engine(torch.randn(4, 8)).square().mean()
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
