"""Lightning's own launcher. The dataset of rank 1 waits for a lock."""

import os
import threading

import lightning
import torch
from torch.utils.data import DataLoader

RANKS = 2


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Shards(torch.utils.data.Dataset):
    def __init__(self):
        self.lock = threading.Lock()
        self.count = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.count += 1
        if os.environ.get("LOCAL_RANK") == "1" and self.count == 16:
            self.lock.acquire()
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            self.lock.acquire()  # PLANTED
        return (torch.ones(8),)


def main():
    loader = DataLoader(Shards(), batch_size=4)
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
