"""Real runs of the composed parts with each algorithm: what the trainer is sent, and that training goes through."""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_work import MODEL_CONFIG

from rollart.algo.advantage import gigpo
from rollart.app.compose import check_real, real_parts
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.control.pipeline import run_pipeline
from rollart.distributed.inline import InlineRuntime
from rollart.observe.audit import audit
from rollart.observe.journal import MemoryJournal
from rollart.ports.environment import TextStep
from rollart.types.journal import StepTrained
from rollart.types.messages import Role, Train
from rollart.types.trajectory import Prompt, TrainSample

BATCHES: list[tuple[TrainSample, ...]] = []
NOISE = itertools.count()


class Corridor:
    """Up to three doors. The action decides what a door pays and whether it is the last; every door is a state."""

    def __init__(self, *, noisy: bool = False, named: bool = False) -> None:
        self._noisy, self._named = noisy, named
        self._door = 0

    def reset(self, prompt: Prompt) -> TextStep:
        return self._seen(f"seed {prompt.seed}", 0.0, done=False)

    def step(self, action: str) -> TextStep:
        self._door += 1
        code = sum(action.encode())
        return self._seen(f"door {self._door}", code % 3 / 2, done=self._door == 3 or code % 5 == 0)

    def close(self) -> None:
        pass

    def _seen(self, text: str, reward: float, *, done: bool) -> TextStep:
        noise = f" {next(NOISE)}" if self._noisy else ""
        return TextStep(text + noise, reward, done, state=str(self._door) if self._named else "")


class Recording(TorchTrainer):
    """Keeps what it is sent."""

    def _step(self, train: Train) -> dict[str, float]:
        BATCHES.append(train.samples)
        return super()._step(train)


def run(algorithm: Mapping[str, Any], corridor: Mapping[str, bool], folder: Path) -> MemoryJournal:
    config = check(
        RunConfig,
        {
            "steps": 2,
            "batch": {"trajectories": 8, "group_size": 4},
            "checkpoint_every": 1,
            "algorithm": dict(algorithm),
            "tasks": {
                "corridor": {
                    "environment": f"{__name__}:Corridor",
                    "environment_settings": dict(corridor),
                    "environments": 8,
                    "max_turn_tokens": 4,
                    "max_context": 200,
                }
            },
            "pools": {"local": {}},
            "model": {"config": MODEL_CONFIG | {"vocab_size": 260, "max_position_embeddings": 256}},
        },
    )
    check_real(config)
    BATCHES.clear()
    journal = MemoryJournal()

    async def main() -> None:
        parts = real_parts(config, InlineRuntime(), journal, MemoryStore(), folder)
        workers = [
            dataclasses.replace(spec, factory=f"{__name__}:Recording") if spec.role is Role.TRAINER else spec
            for spec in parts.workers
        ]
        await run_pipeline(config, dataclasses.replace(parts, workers=workers))

    asyncio.run(main())
    assert not audit(journal.events)
    assert len(BATCHES) == 2
    return journal


def in_groups(samples: tuple[TrainSample, ...]) -> list[list[TrainSample]]:
    return [list(group) for _, group in itertools.groupby(samples, key=lambda sample: sample.group)]


State = Callable[[int, int], object]


@pytest.mark.parametrize(
    ("corridor", "state"),
    [
        pytest.param({}, lambda _, turn: turn, id="the observation is the state"),
        pytest.param({"noisy": True}, lambda member, turn: (member, turn), id="no two observations are the same"),
        pytest.param({"noisy": True, "named": True}, lambda _, turn: turn, id="the environment names its state"),
    ],
)
def test_gigpo_compares_turns_by_what_the_environment_says(
    corridor: dict[str, bool], state: State, tmp_path: Path
) -> None:
    run({"advantage": "gigpo"}, corridor, tmp_path)
    for group in itertools.chain.from_iterable(map(in_groups, BATCHES)):
        assert len(group) == 4
        assert all(sum(turn.tokens for turn in sample.turns) == sample.sequences[0].sampled for sample in group)
        states = [[state(member, turn) for turn in range(len(each.turns))] for member, each in enumerate(group)]
        expected = gigpo(states, [[turn.reward for turn in each.turns] for each in group])
        for sample, turns in zip(group, expected, strict=True):
            assert [turn.advantage for turn in sample.turns] == pytest.approx(turns)
    if not corridor:
        assert any(len({turn.advantage for turn in sample.turns}) > 1 for batch in BATCHES for sample in batch)


def test_gae_and_several_steps_go_through_the_trainer(tmp_path: Path) -> None:
    algorithm = {
        "advantage": "gae",
        "trace": 0.9,
        "epochs": 2,
        "minibatches": 2,
        "loss": {"kind": "cispo", "correction": {"kind": "truncate"}},
    }
    journal = run(algorithm, {}, tmp_path)
    for event in journal.events:
        if isinstance(event, StepTrained):
            assert event.metrics["updates"] == 4
            assert event.metrics["value_loss"] > 0
            assert event.metrics["mismatch"] < 0.1
    assert all((folder / "critic.safetensors").is_file() for folder in tmp_path.iterdir())
