"""Fault injection: artificial latency and failures of environments, to test that a run survives them."""

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
