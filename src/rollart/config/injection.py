"""Injection: failures and latency of environments, to test that a run survives them, and slow engines."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from rollart.config.base import Strict


class Injection(Strict):
    """Faults injected into the environments of a task. See `rollart.backends.environments.inject`."""

    latency_ms: float = Field(default=0.0, ge=0)
    """Mean of a log-normal delay before every reset and step."""
    sigma: float = Field(default=1.0, ge=0)
    """Standard deviation of the delay's logarithm: 0 = always the mean, 1 = a long tail."""
    hang_share: float = Field(default=0.0, ge=0, le=1)
    """Probability that a reset or step hangs."""
    hang_s: float | None = Field(default=None, gt=0)
    """Duration of a hang; None = forever."""
    raise_every: int | None = Field(default=None, ge=1)
    """The environment raises at every n-th turn of an episode, so episodes of that length never succeed."""
    bad_slots: tuple[int, ...] | None = None
    """Slots whose environments hang and raise; None = all. Latency applies to all slots."""


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
