"""The critic of `gae`: what is to be expected before a token, learnt beside the policy, and advantages made of it.

    V(token) = a linear layer on the state that the token is predicted from, in float32

What holds:
- it starts at 0, so the first advantages are those of the rewards alone;
- advantages and returns are made of the values before the first update on a batch, over all action tokens of a
  trajectory in their order, through all its sequences;
- where an episode ended nothing is expected any more; where it was cut off, the value of the state it was left in is;
- it is part of checkpoints and never of a published version: engines have no use for it;
- every rank has all of it, and the same.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.algo.advantage import Gae, at_last_tokens, gae, whitened
from rollart.algo.loss import value_loss
from rollart.algo.metrics import Metrics
from rollart.backends.trainers import training_state
from rollart.backends.trainers.checkpoint import Checkpoint
from rollart.backends.trainers.packing import Item
from rollart.backends.trainers.sharding import add_up
from rollart.config.algorithm import CriticSettings
from rollart.types.ids import TrajectoryId

FILE = "critic.safetensors"
Values = NDArray[np.float32]


class Critic:
    """The value head, with an optimiser and a learning rate of its own; its gradient goes into the model too."""

    def __init__(
        self,
        settings: CriticSettings,
        width: int,
        *,
        learning_rate: float,
        max_grad_norm: float,
        device: torch.device,
        ranks: int = 1,
    ) -> None:
        self._settings = settings
        self._rate = settings.value_learning_rate or learning_rate
        self._max_grad_norm = max_grad_norm
        self._ranks = ranks
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
        """The rows with advantages and returns, from the values of their tokens; and how good the values were.

        `rewards` are those of the turns; `left_at` has the value of the last state of trajectories that were cut off.
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
        advantages = np.concatenate([part.advantages for part in parts])
        returns = np.concatenate([part.returns for part in parts])
        explained = _explained(returns, np.concatenate(values))
        ends = np.cumsum([row.targets.size for row in rows])[:-1]
        cut_advantages = np.split((whitened(advantages) if own.whiten else advantages).astype(np.float32), ends)
        cut_returns = np.split(returns.astype(np.float32), ends)
        return [
            row._replace(advantages=mine, returns=to_learn)
            for row, mine, to_learn in zip(rows, cut_advantages, cut_returns, strict=True)
        ], {"explained_variance": explained}

    def loss(self, hidden: torch.Tensor, members: Sequence[Item], total: float) -> tuple[torch.Tensor, Metrics]:
        """The share of these tokens in the value loss, with its weight."""
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
        """Bound the gradient of the head, of all ranks together; gives its norm before."""
        if self._ranks > 1:
            add_up(parameter.grad for parameter in self._head.parameters() if parameter.grad is not None)
        return float(torch.nn.utils.clip_grad_norm_(self._head.parameters(), self._max_grad_norm))

    def apply(self, share: float) -> None:
        """One step, at this share of the learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * share
        self._optimizer.step()

    # --- checkpoints

    def file(self) -> tuple[str, bytes]:
        return FILE, training_state.module_state(self._head, self._optimizer)

    def restore(self, checkpoint: Checkpoint) -> None:
        training_state.restore_module(checkpoint.file(FILE), self._head, self._optimizer)


def _explained(returns: NDArray[np.float64], values: NDArray[np.float32]) -> float:
    """1 − Var(returns − values) / Var(returns): 1 if values are right, 0 if they say no more than a constant would."""
    spread = float(returns.var())
    return 1.0 - float((returns - values).var()) / spread if spread else 0.0
