"""Injection: failures and latency of environments, to test that a run survives them, and slow engines."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rollart.config.base import Strict
from rollart.config.numbers import NotNegativeReal, PositiveReal


class Latency(Strict):
    """A log-normal time in seconds, with the names of the simulator's distributions (`sim.tasks.NAME.reset_s`).

    Values are clipped to `min` and `max`. A share `tail_share` of all draws takes exactly `tail`: the rare hang.
    """

    kind: Literal["lognormal"] = "lognormal"
    median: PositiveReal
    sigma: NotNegativeReal = 0.0
    """Standard deviation of the logarithm; 0 = always the median."""
    min: NotNegativeReal = 0.0
    max: PositiveReal | None = None
    tail_share: float = Field(default=0.0, ge=0, lt=1)
    tail: PositiveReal | None = None

    @model_validator(mode="before")
    @classmethod
    def _number_is_the_median(cls, data: Any) -> Any:
        return {"median": data} if isinstance(data, int | float) and not isinstance(data, bool) else data

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max is not None and self.max < self.min:
            raise ValueError("max is below min")
        if (self.tail_share > 0) != (self.tail is not None):
            raise ValueError("tail_share and tail go together")
        return self


class Tails(Strict):
    """Latencies and failures of a task of the field."""

    reset_s: Latency
    step_s: Latency
    reset_failure: float


PROFILES: Mapping[str, Tails] = {
    "swe": Tails(
        reset_s=Latency(median=20.0, sigma=0.45, min=14.0, max=70.0, tail_share=0.0008, tail=500.0),
        step_s=Latency(median=4.0, sigma=0.4, max=30.0, tail_share=0.001, tail=30.0),
        reset_failure=0.0002,
    )
}
"""`swe`: SWE-bench in containers, as the RollArt paper measured it. A reset takes 14 s or more, half of them more than
20 s, almost none more than 70 s, and the worst 500 s; a step 4 s, at most 30 s. One reset in a thousand hangs or fails,
which hits every tenth batch of a hundred episodes. The simulated cluster of the paper has the same figures."""


class Injection(Strict):
    """Faults injected into the environments of a task. See `rollart.backends.environments.inject`."""

    tails: Literal["", "swe"] = ""
    """Latencies and failures as measured in the field, by name (`PROFILES`); keys below replace parts of them."""
    scale: PositiveReal = 1.0
    """Factor of all times: 0.01 plays them a hundred times as fast."""
    reset_s: Latency | None = None
    """Delay before every reset, in seconds: a number, or a log-normal distribution."""
    step_s: Latency | None = None
    """Likewise before every step."""
    reset_failure: float | None = Field(default=None, ge=0, le=1)
    """Probability that a reset fails, after its delay."""
    step_failure: float = Field(default=0.0, ge=0, le=1)
    """Likewise for a step."""
    latency_ms: float = Field(default=0.0, ge=0)
    """Mean of a further log-normal delay before every reset and step."""
    sigma: float = Field(default=1.0, ge=0)
    """Standard deviation of its logarithm: 0 = always the mean, 1 = a long tail."""
    hang_share: float = Field(default=0.0, ge=0, le=1)
    """Probability that a reset or step hangs."""
    hang_s: float | None = Field(default=None, gt=0)
    """Duration of a hang; None = forever."""
    raise_every: int | None = Field(default=None, ge=1)
    """The environment raises at every n-th turn of an episode, so episodes of that length never succeed."""
    bad_slots: tuple[int, ...] | None = None
    """Slots whose environments hang, fail and raise; None = all. Latency applies to all slots."""

    def latency(self, turn: int) -> Latency | None:
        """Delays of a turn; turn 0 is the reset."""
        given, profile = (self.step_s if turn else self.reset_s), PROFILES.get(self.tails)
        if given is not None or profile is None:
            return given
        return profile.step_s if turn else profile.reset_s

    def failure(self, turn: int) -> float:
        """Probability that a turn fails; turn 0 is the reset."""
        if turn or self.reset_failure is not None:
            return self.step_failure if turn else self.reset_failure or 0.0
        return PROFILES[self.tails].reset_failure if self.tails else 0.0


def _several(value: object) -> object:
    return (value,) if isinstance(value, Mapping) else value


Injections = Annotated[tuple[Injection, ...], BeforeValidator(_several)]
"""One table or a list of tables, each with its own slots."""


class Slowdown(Strict):
    """Slow engines on purpose, so that two pools of one machine behave like unlike hardware.

    An engine waits after every step, for the extra share of the step's measured time.
    """

    prefill: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    """Factor of the time spent on prompts, and on KV that an update invalidated."""
    decode: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    """Factor of the time spent on sampling."""
    from_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds after the start of the engine from which on it holds, in place of the one before."""


Slowdowns = Annotated[tuple[Slowdown, ...], BeforeValidator(_several)]
"""One table or a list of tables, by `from_s`: a pool that changes its speed."""


def slowdown_at(slowdowns: Slowdowns, seconds: float) -> Slowdown:
    """The one that holds at a time after the start of the engine."""
    holds = [each for each in slowdowns if each.from_s <= seconds]
    return max(holds, key=lambda each: each.from_s) if holds else Slowdown()
