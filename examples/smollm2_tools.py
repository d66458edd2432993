"""A real pretrained model, SmolLM2-135M-Instruct, learns two tasks with LoRA on a CPU; one of them has a tool.

    make model-smollm2
    python examples/smollm2_tools.py models/smollm2

`larger`: which of two numbers is larger, as a number and nothing else. `product`: a product that the model cannot
compute in its head; it calls a calculator and repeats the result.

    user   What is 37 * 46? …          agent   CALC 37 * 46
    user   CALC says 1702. …           agent   1702

A right answer earns 1, of which the right call of the calculator is a part. The model never calls the calculator by
itself, so a short supervised training comes first, on players who are right about half of the time. Then it is
reinforced. The last lines compare the first quarter of the steps with the last one.
"""

import argparse
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rollart

CALL = re.compile(r"CALC\s*(\d{1,4})\s*\*\s*(\d{1,4})")
NUMBER = re.compile(r"\d{1,9}")
CALL_REWARD = 0.25


class Larger:
    """One turn: 1 for the larger number alone, a little if it is the first number of a longer answer."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        one, other = random.Random(seed).sample(range(10, 100), 2)
        self.right = str(max(one, other))
        return f"Which number is larger, {one} or {other}? Reply with the number only.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        first = NUMBER.search(action)
        alone = action.strip() == self.right
        partly = first is not None and first[0] == self.right
        return "", 1.0 if alone else 0.25 * partly, True, False, {}


class Product:
    """Two turns: a call of the calculator, then the answer. An answer without a call ends the episode."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        chance = random.Random(seed)
        self.one, self.other = chance.randint(11, 99), chance.randint(11, 99)
        self.called = False
        return (
            "You have a calculator. To use it, reply like this: CALC 12 * 34\n"
            f"What is {self.one} * {self.other}? First use the calculator."
        ), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        call = CALL.search(action)
        if call is not None and not self.called:
            self.called = True
            result = calculator(int(call[1]), int(call[2]))
            asked = {int(call[1]), int(call[2])} == {self.one, self.other}
            return f"CALC says {result}. Reply with the number only.", CALL_REWARD * asked, False, False, {}
        right = action.strip() == str(self.one * self.other)
        return "", (1.0 - CALL_REWARD * self.called) * right, True, False, {}


def calculator(one: int, other: int) -> int:
    """The tool."""
    return one * other


def guesses(observations: Sequence[str], chance: random.Random) -> str:
    """Plays `larger`: either of the two numbers."""
    return chance.choice(NUMBER.findall(observations[-1]))


def hasty(observations: Sequence[str], chance: random.Random) -> str:
    """Plays `product`: mostly calls the calculator, and mostly repeats what it says."""
    *_, one, other = NUMBER.findall(observations[0])
    if len(observations) == 1:
        return f"CALC {one} * {other}" if chance.random() < 0.7 else str(chance.randint(121, 9801))
    return NUMBER.findall(observations[-1])[0] if chance.random() < 0.7 else one


def quarters(rewards: list[float]) -> tuple[float, float, float]:
    """Mean of the first and of the last quarter, and the standard error of their difference."""
    size = len(rewards) // 4
    first, last = rewards[:size], rewards[-size:]
    error = (statistics.variance(first) / size + statistics.variance(last) / size) ** 0.5
    return statistics.fmean(first), statistics.fmean(last), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path, help="folder that `make model-smollm2` writes")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--runtime", default="ray")
    arguments = parser.parse_args()
    limits = {"environments": 16, "hold_out": "seed", "max_context": 192, "max_turn_tokens": 12}
    config: dict[str, Any] = {
        "name": "smollm2-tools",
        "tasks": {
            "larger": rollart.Task(Larger, max_turns=1, **limits),
            "product": rollart.Task(Product, max_turns=2, **limits),
        },
        "pools": {"local": {"slots": 16, "prefill_tokens": 512}},
        "batch": {"trajectories": 16, "group_size": 8},
        "mode": "one_off",
        "algorithm": {"advantage": "dr_grpo", "loss": {"clip_high": 0.28}},
        "trainer": {"learning_rate": 2e-4, "token_budget": 1024, "lora": {"rank": 16, "alpha": 32.0}},
        "sft": {"episodes": 48, "steps": 16, "batch_tokens": 384, "held_out_share": 0.1, "eval_every": 8},
    }
    start = rollart.sft(
        config,
        model=str(arguments.model),
        demonstrations={"larger": guesses, "product": hasty},
        out=arguments.out / "sft",
    )
    rewards: dict[str, list[float]] = {"larger": [], "product": []}

    def keep(step: rollart.StepRecord) -> None:
        for task, reward in step.kept_rewards.items():
            rewards[task].append(reward)

    rollart.run(
        config,
        model=str(start.model),
        steps=arguments.steps,
        out=arguments.out / "run",
        runtime=arguments.runtime,
        on_step=keep,
    )
    for task, kept in rewards.items():
        if len(kept) >= 8:
            first, last, error = quarters(kept)
            print(f"{task}: mean reward {first:.3f} in the first quarter, {last:.3f} in the last, ± {error:.3f}")


if __name__ == "__main__":
    main()
