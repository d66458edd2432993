"""How a trainer trains, where it matters to a user: optimiser, precision, processes. Imports without torch."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollart.config.base import Strict

PositiveReal = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Schedule(Strict):
    """The learning rate as a function of the steps made so far: there is no state to save but their number.

    Steps that were skipped do not count.
    """

    kind: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    """It grows in equal parts, and has its full value in the step after so many."""
    total_steps: int | None = Field(default=None, ge=1)
    """Of `cosine`: after so many steps, warm-up included, it has fallen to `final_share` and stays there."""
    final_share: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kind == "cosine" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError("a cosine needs total_steps, and more of them than warmup_steps")
        if self.kind == "constant" and (self.total_steps is not None or self.final_share):
            raise ValueError("total_steps and final_share belong to the schedule `cosine`")
        return self

    def share(self, steps: int) -> float:
        """Of the full learning rate, for the step after `steps` of them.

        >>> [Schedule(warmup_steps=2).share(steps) for steps in range(4)]
        [0.3333333333333333, 0.6666666666666666, 1.0, 1.0]
        >>> [round(Schedule(kind="cosine", total_steps=4).share(steps), 3) for steps in range(6)]
        [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
        """
        if steps < self.warmup_steps:
            return (steps + 1) / (self.warmup_steps + 1)
        if self.total_steps is None:
            return 1.0
        gone = min(1.0, (steps - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.final_share + (1.0 - self.final_share) * (1.0 + math.cos(math.pi * gone)) / 2


class LoraSettings(Strict):
    """Factors beside the linear layers are trained instead of the model."""

    rank: int = Field(default=16, ge=1)
    alpha: PositiveReal = 32.0
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """The linear layers that get factors, by the ends of their names; `all-linear` is all but the output head."""
    publish: Literal["adapter", "merged"] = "adapter"
    """What engines get: the factors, or all weights with the factors in them."""


class TrainerSettings(Strict):
    """The `[trainer]` of a run."""

    learning_rate: PositiveReal = 1e-3
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_grad_norm: PositiveReal = 1.0
    schedule: Schedule = Schedule()
    token_budget: int = Field(default=2048, ge=1)
    """Tokens of one forward and backward pass; memory grows with it, the result does not depend on it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """In which layers are computed and weights are published."""
    device: str = "cpu"
    gradient_checkpointing: bool = False
    ranks: int = Field(default=1, ge=1)
    """Over so many processes weights, gradients and optimiser are cut (FSDP2); on `cuda` each has a GPU of its own."""
    lora: LoraSettings | None = None
