"""The interface of losses: a function from the action tokens of a micro-batch to a loss per token.

    def reinforce(batch: PackedBatch, bounds: RatioBounds, *, baseline: float = 0.0) -> torch.Tensor:
        return -(batch.advantages - baseline) * batch.logprobs

`policy_loss` does the rest, for built-in losses and those of users alike: off-policy weights, the mean over tokens or
sequences, the KL penalty and the entropy bonus.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from rollart.algo.packed import PackedBatch

F = TypeVar("F", bound=Callable[..., Any])


class Surrogate(NamedTuple):
    """Per-token surrogate loss, and the ratio it used."""

    loss: torch.Tensor
    ratio: torch.Tensor
    """Detached."""


SurrogateFunction = Callable[..., "Surrogate | torch.Tensor"]
"""`function(batch: PackedBatch, bounds: RatioBounds, **settings)`. A function that returns a tensor has the plain ratio
of the token."""


class BadLoss(Exception):
    """A loss function returned something unusable."""


def zero_without_advantage(function: F) -> F:
    """Decorator: the loss of a sequence whose advantages are all 0 has no gradient, so its backward pass is skipped."""
    function.zero_without_advantage = True  # type: ignore[attr-defined]
    return function


def needs_every_sequence(function: SurrogateFunction) -> bool:
    """Whether sequences without any advantage have a gradient too."""
    return not getattr(function, "zero_without_advantage", False)


def proximal(batch: PackedBatch) -> torch.Tensor:
    """Log-probabilities that the ratio is taken against."""
    return batch.behaviour if batch.proximal is None else batch.proximal


def checked(name: str, answer: object, batch: PackedBatch) -> Surrogate:
    """The answer of a loss function; raises `BadLoss`, naming the function."""
    if isinstance(answer, torch.Tensor):
        answer = Surrogate(answer, torch.exp(batch.logprobs.detach() - proximal(batch)))
    if not isinstance(answer, Surrogate):
        raise BadLoss(f"the loss {name} returned a {type(answer).__name__}; it must be a tensor with a loss per token")
    for part, tensor in zip(("loss", "ratio"), answer, strict=True):
        if not isinstance(tensor, torch.Tensor) or tensor.shape != batch.logprobs.shape:
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise BadLoss(
                f"the loss {name} returned a {part} of shape {shape} for {batch.logprobs.numel()} tokens; it must have "
                "one number per token"
            )
    if batch.logprobs.requires_grad and not answer.loss.requires_grad:
        raise BadLoss(f"the loss {name} has no gradient: it must depend on batch.logprobs")
    return answer
