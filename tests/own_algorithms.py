"""Advantages, losses and callbacks as a user writes them; tests name them by factory path."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollart import Group, StepRecord, Stop
from rollart.algo.packed import PackedBatch
from rollart.algo.surrogate import zero_without_advantage
from rollart.config.algorithm import RatioBounds

HERE = f"{__file__}:"


def same_as_grpo(batch: Sequence[Group], *, epsilon: float = 1e-6) -> list[list[float]]:
    return [_standardised(np.array(group.rewards), epsilon).tolist() for group in batch]


def _standardised(rewards: NDArray[np.float64], epsilon: float) -> NDArray[np.float64]:
    if rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    centred: NDArray[np.float64] = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + epsilon)


def first_turn_only(batch: Sequence[Group]) -> list[list[list[float]]]:
    return [[[member.reward] + [0.0] * (member.turns - 1) for member in group.members] for group in batch]


def one_too_few(batch: Sequence[Group]) -> list[list[float]]:
    return [group.rewards[1:] for group in batch]


def not_a_number(batch: Sequence[Group]) -> list[list[float]]:
    return [[math.nan for _ in group.members] for group in batch]


def not_a_list(batch: Sequence[Group]) -> float:
    return float(len(batch))


def raises(batch: Sequence[Group]) -> list[list[float]]:
    raise KeyError(batch[0].task)


_calls = iter(range(10**9))


def random(batch: Sequence[Group]) -> list[list[float]]:
    return [[float(next(_calls)) for _ in group.members] for group in batch]


def no_arguments() -> list[list[float]]:
    return []


@zero_without_advantage
def same_as_ppo(batch: PackedBatch, bounds: RatioBounds) -> torch.Tensor:
    ratio = torch.exp(batch.logprobs - batch.behaviour)
    return -torch.minimum(ratio * batch.advantages, ratio.clamp(bounds.low, bounds.high) * batch.advantages)


def reinforce(batch: PackedBatch, bounds: RatioBounds, *, scale: float = 1.0) -> torch.Tensor:  # noqa: ARG001
    return -scale * batch.advantages * batch.logprobs


def of_the_wrong_shape(batch: PackedBatch, bounds: RatioBounds) -> torch.Tensor:  # noqa: ARG001
    return -(batch.advantages * batch.logprobs).sum()


def without_gradient(batch: PackedBatch, bounds: RatioBounds) -> torch.Tensor:  # noqa: ARG001
    return -batch.advantages * batch.behaviour


def infinite(batch: PackedBatch, bounds: RatioBounds) -> torch.Tensor:  # noqa: ARG001
    return batch.logprobs / 0.0


def stop_after_two(step: StepRecord) -> Stop | None:
    return Stop("enough") if step.step == 2 else None
