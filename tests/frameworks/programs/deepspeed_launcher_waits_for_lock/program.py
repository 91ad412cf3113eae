"""DeepSpeed by its own launcher, on one node. Rank 2 waits for a lock on the data that nobody releases."""

import fcntl
import os
import tempfile

import deepspeed
import torch


def read_locked():
    with tempfile.NamedTemporaryFile() as held, open(held.name) as wanted:
        fcntl.flock(held, fcntl.LOCK_EX)
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        fcntl.flock(wanted, fcntl.LOCK_EX)  # PLANTED


def main():
    deepspeed.init_distributed("gloo")
    model = torch.nn.Linear(8, 2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(10):
        if step == 5 and engine.global_rank == 2:
            read_locked()
        loss = engine(torch.randn(4, 8)).square().mean()
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
