"""Fault injection for environments: latency and failures on purpose, to test how a run survives them.

Invariant: what happens in a turn depends only on the episode's seed, its member number, the turn and the injection's
index, so a run meets the same faults every time it is started.
"""

import math
import random
import threading
import time
from collections.abc import Awaitable
from statistics import NormalDist

from rollart.config.injection import Injection, Latency
from rollart.ports.environment import AnyTextEnvironment, TextStep
from rollart.types.errors import EnvironmentFault
from rollart.types.messages import Reset
from rollart.types.trajectory import Prompt

_SMALLEST = 2.0**-52


class Injected:
    """A `TextEnvironment` wrapped around another one, for one episode. `number` is the injection's index."""

    def __init__(self, inner: AnyTextEnvironment, injection: Injection, reset: Reset, number: int = 0) -> None:
        self._inner = inner
        self._injection = injection
        self._bad = injection.bad_slots is None or reset.slot in injection.bad_slots
        self._number = number
        self._seed, self._member = reset.prompt.seed, reset.member
        self._turn = 0

    def reset(self, prompt: Prompt) -> TextStep | Awaitable[TextStep]:
        self._trouble()
        return self._inner.reset(prompt)

    def step(self, action: str) -> TextStep | Awaitable[TextStep]:
        self._turn += 1
        self._trouble()
        return self._inner.step(action)

    def close(self) -> Awaitable[None] | None:
        return self._inner.close()

    def abandon(self) -> None:
        """Stop waiting for an environment in another process."""
        abandon = getattr(self._inner, "abandon", None)
        if abandon is not None:
            abandon()

    def _trouble(self) -> None:
        own = self._injection
        chance = _chance(self._number, self._seed, self._member, self._turn)
        hung, waits = chance.random() < own.hang_share, chance.gauss(-(own.sigma**2) / 2, own.sigma)
        latency, fails = own.latency(self._turn), chance.random() < own.failure(self._turn)
        seconds = own.latency_ms / 1000 * math.exp(waits)
        if latency is not None:
            seconds += drawn(latency, chance.random())
        if seconds:
            time.sleep(seconds * own.scale)
        if not self._bad:
            return
        if hung:
            threading.Event().wait(own.hang_s and own.hang_s * own.scale)
        what = f"turn {self._turn}" if self._turn else "the reset"
        if fails:
            raise EnvironmentFault(f"injected at {what}: its probability is {own.failure(self._turn):g}")
        if own.raise_every and self._turn and self._turn % own.raise_every == 0:
            raise EnvironmentFault(f"injected at {what}: raise_every is {own.raise_every}")


def drawn(latency: Latency, share: float) -> float:
    """Seconds at `share` in [0, 1): the inverse distribution function, with the rare tail at its lower end.

    >>> resets = Latency(median=20, sigma=0.45, min=14, max=70, tail_share=0.001, tail=500)
    >>> drawn(resets, 0.0005), round(drawn(resets, 0.5), 1), drawn(resets, 0.9999)
    (500.0, 20.0, 70.0)
    """
    if latency.tail is not None and share < latency.tail_share:
        return latency.tail
    share = (share - latency.tail_share) / (1 - latency.tail_share)
    inside = min(max(share, _SMALLEST), 1 - _SMALLEST)
    seconds = latency.median * math.exp(latency.sigma * NormalDist().inv_cdf(inside))
    return max(latency.min, seconds if latency.max is None else min(seconds, latency.max))


def hangs(injection: Injection, seed: int, member: int, turn: int, number: int = 0) -> bool:
    """Whether this turn of an episode hangs, if its slot is affected; turn 0 is the reset."""
    return _chance(number, seed, member, turn).random() < injection.hang_share


def _chance(number: int, seed: int, member: int, turn: int) -> random.Random:
    """Every injection has its own random stream, so that two of them do not hang in the same turns."""
    return random.Random(f"{number}/{seed}/{member}/{turn}")
