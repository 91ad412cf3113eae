"""Lightning's own launcher with hangwatch's callback: the validation of rank 1 takes longer than the limit for stalls."""

import time

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from hangwatch.integrations.lightning import HangwatchCallback

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

    def validation_step(self, batch, index):
        self.log("error", self.layer(batch[0]).square().mean(), sync_dist=True)

    def on_validation_epoch_start(self):
        time.sleep(12 if self.global_rank == 1 and not self.trainer.sanity_checking else 0)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4)


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
        callbacks=[HangwatchCallback(validation_limit=60)],
    )
    trainer.fit(Model(), loader)


if __name__ == "__main__":
    main()
