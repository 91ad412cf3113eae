"""Lightning's own launcher. The training step of rank 1 raises an exception."""

import os

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
        if self.global_rank == 1 and index == 4:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            raise ValueError("a corrupt record")  # PLANTED
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main():
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
