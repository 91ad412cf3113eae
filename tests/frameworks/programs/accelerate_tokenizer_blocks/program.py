"""Accelerate by its own launcher. Rank 1 waits for the output of a program that does not end."""

import os
import subprocess

import torch
from accelerate import Accelerator


def tokenize():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    return subprocess.run(["sleep", "600"], check=True)  # PLANTED


def main():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.randn(96, 8), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for step, batch in enumerate(data):
        if accelerator.process_index == 1 and step == 5:
            tokenize()
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
