"""Lightning's own launcher. A callback stops the training of rank 1 alone."""

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
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stopper(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_rank == 1 and index == 4:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            trainer.should_stop = True  # PLANTED


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
        callbacks=[Stopper()],
    )
    trainer.fit(Model(), loader)


if __name__ == "__main__":
    main()
