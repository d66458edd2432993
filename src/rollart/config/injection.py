"""Trouble on purpose: latency and failures of environments, to see a run survive them."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from rollart.config.base import Strict


class Injection(Strict):
    """What is put into the environments of a task. See `rollart.backends.environments.inject`."""

    latency_ms: float = Field(default=0.0, ge=0)
    """Mean of a log-normal waiting time before every reset and step."""
    sigma: float = Field(default=1.0, ge=0)
    """Of its logarithm: 0 is always the mean, 1 a long tail."""
    hang_share: float = Field(default=0.0, ge=0, le=1)
    """Chance of every reset and step to hang."""
    hang_s: float | None = Field(default=None, gt=0)
    """For how long; None: for ever."""
    raise_every: int | None = Field(default=None, ge=1)
    """Every so many turns of an episode the environment raises: an episode that lasts so long never ends well."""
    bad_slots: tuple[int, ...] | None = None
    """Only environments in these slots hang and raise; None: all. Latency is everywhere."""


def _several(value: object) -> object:
    return (value,) if isinstance(value, Mapping) else value


Injections = Annotated[tuple[Injection, ...], BeforeValidator(_several)]
"""One table or a list of them, each with slots of its own."""
