"""Accelerate by its own launcher. Rank 1 catches an exception and goes on with the next batch; at the end it is a step ahead."""

import os

import torch
from accelerate import Accelerator


def check(batch, rank, step):
    if rank == 1 and step == 5:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        raise ValueError("a corrupt record")  # PLANTED


def main():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.randn(96, 8), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for step, batch in enumerate(data):
        try:
            check(batch, accelerator.process_index, step)
        except ValueError:
            continue
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
