"""The learning rate as a function of the steps made so far: there is no state to save but their number."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from rollart.config.base import Strict


class Schedule(Strict):
    """How the learning rate goes. Steps that were skipped do not count."""

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
