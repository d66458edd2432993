"""Tabular worlds with a known optimum, and a training loop whose behaviour policy lags behind.

A policy is a table of logits (state, action), a token is an action. `train` keeps every version it makes: a trajectory
starts with the version of `staleness` updates ago and takes up newer ones while it runs, as in an engine that is
updated between two turns. Every token keeps the log-probability it was sampled with. What a policy is worth is
computed, not sampled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from rollart.algo.advantage import Gae, dr_grpo, gae, gigpo, grpo, reinforce_plus_plus, rloo
from rollart.algo.loss import policy_loss, value_loss
from rollart.algo.packed import PackedBatch
from rollart.config.algorithm import LossSettings

Row = TypeVar("Row")


@dataclass(frozen=True)
class World:
    """Deterministic moves. `next[s, a]` is the state after, −1 where the episode ends; every episode starts in 0."""

    next: np.ndarray
    reward: np.ndarray
    horizon: int
    start: np.ndarray
    """The logits of version 0."""

    def worth(self, logits: np.ndarray) -> float:
        """The expected return of the policy, by dynamic programming."""
        policy = softmax(logits)
        value = np.zeros(len(self.next) + 1)  # the last one is the end
        for _ in range(self.horizon):
            value[:-1] = (policy * (self.reward + value[self.next])).sum(-1)
        return float(value[0])


BANDIT = World(
    next=np.full((1, 4), -1),
    reward=np.array([[0.2, 0.6, 0.0, 1.0]]),
    horizon=1,
    start=np.zeros((1, 4)),
)
"""The best arm pays 1."""

STAIRS = World(
    next=np.array([[1, -1, 0], [2, -1, 1], [-1, -1, 2]]),
    reward=np.array([[0.0, 0.4, 0.0], [0.0, 0.4, 0.0], [1.0, 0.4, 0.0]]),
    horizon=5,
    start=np.zeros((3, 3)),
)
"""Three steps up pay 1, getting off pays 0.4 at any time, waiting pays nothing and costs one of five turns."""

TRAP = World(
    next=np.array([[1, -1, -1], [-1, -1, -1]]),
    reward=np.array([[0.0, 0.7, 0.0], [1.0, 0.0, 0.0]]),
    horizon=2,
    start=np.log([[0.1, 0.6, 0.3], [0.6, 0.2, 0.2]]),
)
"""The popular first move pays 0.7, a rare one leads to where 1 can be had.

As long as the samples are those of version 0, the popular move is seen to beat the average in more than half of them,
the rare one in one of seventeen. Without a correction the policy moves to the popular one until it never tries the
other again; weighted by π / π_b, the average has risen to 0.7, and only the rare one beats it.
"""


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


@dataclass(frozen=True)
class Rollouts:
    """Episodes of whole groups, one row each; `acted` marks the turns of an episode."""

    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    behaviour: np.ndarray
    versions: np.ndarray
    acted: np.ndarray
    members: int

    def turns(self, table: np.ndarray) -> list[list[Any]]:
        """A table of turns as a list for every episode."""
        return [row[:length].tolist() for row, length in zip(table, self.acted.sum(1), strict=True)]

    def groups(self, rows: Sequence[Row]) -> list[list[Row]]:
        return [list(rows[i : i + self.members]) for i in range(0, len(rows), self.members)]

    def returns(self) -> list[list[float]]:
        """Return of every episode, by group."""
        return self.groups(self.rewards.sum(1).tolist())


def rollout(
    world: World, versions: list[np.ndarray], oldest: int, *, groups: int, members: int, rng: np.random.Generator
) -> Rollouts:
    """Episodes that start with version `oldest`, and after each turn may find a newer one in service."""
    shape = (groups * members, world.horizon)
    states, actions, used = (np.zeros(shape, dtype=int) for _ in range(3))
    rewards, behaviour = np.zeros(shape), np.zeros(shape)
    acted = np.zeros(shape, dtype=bool)
    policies = softmax(np.stack(versions[oldest:]))
    state, version = np.zeros(shape[0], dtype=int), np.zeros(shape[0], dtype=int)
    for turn in range(world.horizon):
        policy = policies[version, state]
        action = (policy.cumsum(1)[:, :-1] < rng.random((shape[0], 1))).sum(1)
        acted[:, turn] = state >= 0
        states[:, turn], actions[:, turn], used[:, turn] = state, action, oldest + version
        rewards[:, turn] = np.where(state >= 0, world.reward[state, action], 0.0)
        behaviour[:, turn] = np.log(policy[np.arange(shape[0]), action])
        state = np.where(state >= 0, world.next[state, action], -1)
        version = np.minimum(version + rng.integers(2, size=shape[0]), len(policies) - 1)
    return Rollouts(states, actions, rewards, behaviour, used, acted, members)


Credit = Callable[[Rollouts, np.ndarray], np.ndarray]
"""Rollouts and the table of values → advantages, one for every turn that was acted in, in order."""


def per_trajectory(advantages: Callable[[list[list[float]]], list[list[float]]]) -> Credit:
    def credit(rollouts: Rollouts, _values: np.ndarray) -> np.ndarray:
        return np.repeat(np.concatenate(advantages(rollouts.returns())), rollouts.acted.sum(1))

    return credit


def by_state(rollouts: Rollouts, _values: np.ndarray) -> np.ndarray:
    groups = zip(
        rollouts.groups(rollouts.turns(rollouts.states)), rollouts.groups(rollouts.turns(rollouts.rewards)), strict=True
    )
    return np.concatenate([turns for group in groups for turns in gigpo(*group, discount=1.0)])


def by_value(rollouts: Rollouts, values: np.ndarray) -> np.ndarray:
    return np.concatenate([part.advantages for part in value_targets(rollouts, values)])


def value_targets(rollouts: Rollouts, values: np.ndarray) -> list[Gae]:
    episodes = zip(rollouts.turns(rollouts.rewards), rollouts.turns(values[rollouts.states]), strict=True)
    return [gae(rewards, expected) for rewards, expected in episodes]


CREDIT: dict[str, Credit] = {
    "grpo": per_trajectory(lambda groups: [grpo(group) for group in groups]),
    "dr_grpo": per_trajectory(lambda groups: [dr_grpo(group) for group in groups]),
    "rloo": per_trajectory(lambda groups: [rloo(group) for group in groups]),
    "reinforce_plus_plus": per_trajectory(reinforce_plus_plus),
    "gigpo": by_state,
    "gae": by_value,
}


def train(
    world: World,
    loss: LossSettings,
    credit: str = "grpo",
    *,
    updates: int,
    rate: float,
    staleness: int = 0,
    epochs: int = 1,
    groups: int = 4,
    members: int = 16,
    seed: int = 0,
) -> float:
    """What the policy is worth in the end. The proximal log-probabilities are recomputed for every batch."""
    rng = np.random.default_rng(seed)
    versions, values = [world.start], np.zeros(len(world.next))
    for update in range(updates):
        rollouts = rollout(world, versions, max(0, update - staleness), groups=groups, members=members, rng=rng)
        advantages = torch.from_numpy(CREDIT[credit](rollouts, values))
        states, actions, behaviour = (
            torch.from_numpy(table[rollouts.acted]) for table in (rollouts.states, rollouts.actions, rollouts.behaviour)
        )
        sequence = torch.from_numpy(np.nonzero(rollouts.acted)[0])
        logits = torch.tensor(versions[-1], requires_grad=True)
        proximal = torch.log_softmax(logits.detach(), -1)[states, actions]
        for _ in range(epochs):
            batch = PackedBatch(
                logprobs=torch.log_softmax(logits, -1)[states, actions],
                behaviour=behaviour,
                proximal=proximal,
                advantages=advantages,
                sequence=sequence,
                sequences=len(rollouts.acted),
                total_tokens=len(actions),
                total_sequences=len(rollouts.acted),
            )
            (gradient,) = torch.autograd.grad(policy_loss(loss, batch)[0], logits)
            logits = (logits.detach() - rate * gradient).requires_grad_()
        versions.append(logits.detach().numpy())
        if credit == "gae":
            values = learn_values(values, rollouts)
    return world.worth(versions[-1])


def learn_values(table: np.ndarray, rollouts: Rollouts) -> np.ndarray:
    """One step of the value head."""
    states = torch.from_numpy(rollouts.states[rollouts.acted])
    returns = torch.from_numpy(np.concatenate([part.returns for part in value_targets(rollouts, table)]))
    weights = torch.tensor(table, requires_grad=True)
    loss, _ = value_loss(weights[states], returns, weights.detach()[states], clip=0.2, total=len(states))
    return table - torch.autograd.grad(loss, weights)[0].numpy()
