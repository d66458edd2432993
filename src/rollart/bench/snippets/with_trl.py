"""A dataset and a reward, trained with TRL: `python with_trl.py MODEL ROWS STEPS OUT`."""

import sys

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def correct(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    return [float(said[0]["content"] == right) for said, right in zip(completions, answer, strict=True)]


def trainer(model: str, rows: str, steps: str, out: str) -> GRPOTrainer:
    return GRPOTrainer(
        model=model,
        reward_funcs=correct,
        train_dataset=load_dataset("json", data_files=rows, split="train"),
        args=GRPOConfig(
            output_dir=out,
            max_steps=int(steps),
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=12,
            learning_rate=1e-6,
            use_cpu=True,
            bf16=False,
        ),
    )


if __name__ == "__main__":
    trainer(*sys.argv[1:]).train()
