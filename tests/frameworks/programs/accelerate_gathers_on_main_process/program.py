"""Accelerate by its own launcher. The main process alone gathers a metric."""

import os

import torch
from accelerate import Accelerator


def main():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.randn(96, 8), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for step, batch in enumerate(data):
        if accelerator.is_main_process and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            accelerator.gather(torch.ones(1))  # PLANTED
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
