"""Critic for `gae`: token values trained alongside the policy, and advantages computed from them.

    V(token) = a linear layer on the hidden state that the token is predicted from, in float32

Invariants:
- Values start at 0, so the first advantages depend on rewards alone.
- Advantages and returns use the values before the first update on a batch, over all action tokens of a trajectory in
  order, across all its sequences.
- The bootstrap value is 0 where an episode ended, and the value of the last state where it was truncated.
- The critic is part of checkpoints and never of a published version: engines do not need it.
- It is replicated on every rank.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.algo.advantage import Gae, Spread, at_last_tokens, gae
from rollart.algo.loss import value_loss
from rollart.algo.metrics import Metrics
from rollart.backends.trainers import training_state
from rollart.backends.trainers.checkpoint import Checkpoint
from rollart.backends.trainers.packing import Item
from rollart.backends.trainers.sharding import add_up, of_each_rank
from rollart.config.algorithm import CriticSettings
from rollart.types.ids import TrajectoryId

FILE = "critic.safetensors"
Values = NDArray[np.float32]


class Critic:
    """The value head, with its own optimiser and learning rate; its gradient also flows into the model."""

    def __init__(
        self,
        settings: CriticSettings,
        width: int,
        *,
        learning_rate: float,
        max_grad_norm: float,
        device: torch.device,
        ranks: int = 1,
        rank: int = 0,
    ) -> None:
        self._settings = settings
        self._rate = settings.value_learning_rate or learning_rate
        self._max_grad_norm = max_grad_norm
        self._ranks = ranks
        self._rank = rank
        self._head = torch.nn.Linear(width, 1, device=device, dtype=torch.float32)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        self._optimizer = torch.optim.AdamW(self._head.parameters(), lr=self._rate, weight_decay=0.0)

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self._head(hidden.float()).squeeze(-1)
        return values

    def credited(
        self,
        rewards: Mapping[TrajectoryId, Sequence[float]],
        rows: Sequence[Item],
        values: Sequence[Values],
        left_at: Mapping[TrajectoryId, float],
    ) -> tuple[list[Item], dict[str, float]]:
        """Add advantages and returns to this rank's rows, given the values of their tokens; also report how good the
        values of all ranks were. Collective.

        `rewards` are per turn; `left_at` has the value of the last state of truncated trajectories.
        """
        own = self._settings
        parts: list[Gae] = []
        for trajectory, of_it in groupby(zip(rows, values, strict=True), key=lambda pair: pair[0].trajectory):
            turns, expected = zip(*((row.turns, value) for row, value in of_it), strict=True)
            earned = at_last_tokens(rewards[trajectory], np.concatenate(turns))
            parts.append(
                gae(
                    earned,
                    np.concatenate(expected).astype(np.float64),
                    discount=own.discount,
                    trace=own.trace,
                    bootstrap=left_at.get(trajectory, 0.0),
                )
            )
        none = np.zeros(0)
        advantages = np.concatenate([none, *(part.advantages for part in parts)])
        returns = np.concatenate([none, *(part.returns for part in parts)])
        explained = _explained(returns, np.concatenate([none, *values]), self._ranks)
        if own.whiten:
            advantages = _spread(advantages, self._ranks).standardised(advantages)
        ends = np.cumsum([row.targets.size for row in rows], dtype=np.int64)[:-1]
        cut_advantages = np.split(advantages.astype(np.float32), ends)[: len(rows)]
        cut_returns = np.split(returns.astype(np.float32), ends)[: len(rows)]
        return [
            row._replace(advantages=mine, returns=to_learn)
            for row, mine, to_learn in zip(rows, cut_advantages, cut_returns, strict=True)
        ], {"explained_variance": explained}

    def loss(self, hidden: torch.Tensor, members: Sequence[Item], total: float) -> tuple[torch.Tensor, Metrics]:
        """Contribution of these tokens to the weighted value loss."""
        values = self.values(hidden)
        known = [member.returns for member in members if member.returns is not None]
        returns = torch.from_numpy(np.concatenate(known)).to(values.device)
        loss, measured = value_loss(values, returns, values.detach(), clip=None, total=total)
        weighted = self._settings.value_weight * loss
        return weighted, measured + Metrics({"loss": weighted.detach()})

    # --- the optimiser

    def clear(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def clip(self) -> float:
        """Sum the head's gradient over ranks and clip it; returns the norm before clipping."""
        if self._ranks > 1:
            add_up(parameter.grad for parameter in self._head.parameters() if parameter.grad is not None)
        return float(torch.nn.utils.clip_grad_norm_(self._head.parameters(), self._max_grad_norm))

    def apply(self, share: float) -> None:
        """Take one optimiser step at this share of the learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * share
        self._optimizer.step()

    # --- checkpoints

    def file(self) -> tuple[str, bytes]:
        return FILE, training_state.module_state(self._head, self._optimizer)

    def restore(self, checkpoint: Checkpoint) -> None:
        training_state.restore_module(
            checkpoint.file(FILE), self._head, self._optimizer, ranks=self._ranks, rank=self._rank
        )


def _explained(returns: NDArray[np.float64], values: NDArray[np.float64], ranks: int) -> float:
    """1 − Var(returns − values) / Var(returns): 1 for exact values, 0 if they are no better than a constant."""
    spread, error = _spread(returns, ranks).variance, _spread(returns - values, ranks).variance
    return 1.0 - error / spread if spread else 0.0


def _spread(own: NDArray[np.float64], ranks: int) -> Spread:
    """Mean and variance over all ranks."""
    return Spread.of_parts(of_each_rank(Spread.of(own), ranks))
