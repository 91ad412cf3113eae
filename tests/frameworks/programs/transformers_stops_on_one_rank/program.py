"""Hugging Face's Trainer. A callback stops the training of rank 1 alone, which goes on to the end of the training."""

import os

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Stopper(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step == 4:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            control.should_training_stop = True  # PLANTED


def main():
    data = [{"x": torch.randn(8), "labels": i % 2} for i in range(64)]
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        max_steps=8,
        per_device_train_batch_size=4,
        save_strategy="no",
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
    )
    trainer = Trainer(model=Model(), args=arguments, train_dataset=data, eval_dataset=data)
    trainer.add_callback(Stopper())
    trainer.train()


if __name__ == "__main__":
    main()
