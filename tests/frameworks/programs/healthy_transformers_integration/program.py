"""Hugging Face's Trainer with hangwatch's callback: a checkpoint of rank 0 takes longer than the limit for stalls."""

import time

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hangwatch.integrations.transformers import HangwatchCallback


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class SlowStorage(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        time.sleep(12 if args.process_index == 0 and state.global_step == 4 else 0)


def main():
    data = [{"x": torch.randn(8), "labels": i % 2} for i in range(64)]
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        max_steps=8,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
    )
    trainer = Trainer(model=Model(), args=arguments, train_dataset=data, eval_dataset=data)
    trainer.add_callback(SlowStorage())
    trainer.add_callback(HangwatchCallback(checkpoint_limit=60))
    trainer.train()


if __name__ == "__main__":
    main()
