"""Accelerate by its own launcher."""

import torch
from accelerate import Accelerator


def main():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.randn(96, 8), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for batch in data:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
