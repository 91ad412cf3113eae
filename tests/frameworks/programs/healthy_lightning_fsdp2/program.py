"""Lightning's FSDP2 strategy, by its own launcher. One epoch."""

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

RANKS = 3


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(9, 3)

    def configure_model(self):
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"], reshard_after_forward=True)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main():
    loader = DataLoader(TensorDataset(torch.randn(96, 9)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), loader)


if __name__ == "__main__":
    main()
