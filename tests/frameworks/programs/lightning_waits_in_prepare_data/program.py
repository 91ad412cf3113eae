"""Lightning's own launcher. Rank 2 waits for a file of its data before the group is made."""

import os
import time

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

RANKS = 3


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def wait_for_data(path):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    while not os.path.exists(path):
        time.sleep(0.2)  # PLANTED


def main():
    if os.environ.get("LOCAL_RANK") == "2":
        wait_for_data("data.ready")
    loader = DataLoader(TensorDataset(torch.randn(96, 8)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), loader)


if __name__ == "__main__":
    main()
