"""A dataset and a reward, trained with rollart: `python with_rollart.py MODEL ROWS STEPS OUT`."""

import sys

import rollart


def correct(t: rollart.Transcript) -> float:
    return float(t.final_text == t.prompt["answer"])


def train(model: str, rows: str, steps: str, out: str) -> rollart.Result:
    return rollart.run(
        model=model,
        tasks={"math": rollart.Task(prompts=rows, reward=correct, max_turn_tokens=12, environments=128)},
        batch={"trajectories": 64, "group_size": 8},
        trainer={"learning_rate": 1e-6},
        steps=int(steps),
        runtime="ray",
        out=out,
    )


if __name__ == "__main__":
    train(*sys.argv[1:])
