"""DeepSpeed by its own launcher, on two nodes."""

import deepspeed
import torch


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
    for _ in range(10):
        loss = engine(torch.randn(4, 8)).square().mean()
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
