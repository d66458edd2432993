"""Pools with a range of engines."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from rollart.config.base import Strict

PositiveReal = Annotated[float, Field(gt=0, allow_inf_nan=False)]

AUTO_ENGINES = 16
"""Maximum of an automatic number of engines, before the devices are known."""


class EngineRange(Strict):
    """Bounds of an elastic pool: engines are added and removed while the run goes on."""

    min: Annotated[int, Field(ge=0)] = 1
    """Engines that are never removed; 0 for nodes that may be missing altogether."""
    max: Annotated[int, Field(gt=0)]
    start: Annotated[int, Field(ge=0)] | None = None
    """Engines at the start; by default as many as the first split gives the pool."""

    @property
    def first(self) -> int:
        """Engines at the start, where no split has been made."""
        return self.max if self.start is None else self.start

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is above max ({self.max})")
        if self.start is not None and not self.min <= self.start <= self.max:
            raise ValueError(f"start ({self.start}) is not between min ({self.min}) and max ({self.max})")
        return self


class ElasticitySettings(Strict):
    """How pools with a range of engines grow and shrink."""

    min_wait: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """A pool grows if the trainer waits for rollout for this share of the time while its engines are busy, and shrinks
    if its engines wait for training for this share while the trainer hardly waits, ..."""
    confirm_steps: Annotated[int, Field(gt=0)] = 2
    """... in this many whole training steps in a row."""
    confirm_s: PositiveReal = 10.0
    """A pool follows its nodes once they have had room for more engines, or for fewer, for this long."""
    hold_s: PositiveReal = 60.0
    """A pool that grew or shrank for training is held for at least this long; twice as long each time that it turned
    from growing to shrinking or back, up to 32 times."""

    @property
    def tick_s(self) -> float:
        """Seconds between two looks at the figures."""
        return min(5.0, self.confirm_s / 4)
