"""DeepSpeed with ZeRO 1 on the CPU. Rank 1 skips a batch, and waits for all at the end while the others reduce the gradients of their last one."""

import os

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
    for step in range(10):
        if step == 5 and engine.global_rank == 1:
            continue
        loss = engine(torch.randn(4, 8)).square().mean()
        engine.backward(loss)
        engine.step()
    if engine.global_rank == 1:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
