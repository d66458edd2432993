"""Fault injection for environments: latency and failures on purpose, to test how a run survives them.

Invariant: what happens in a turn depends only on the episode's seed, its member number, the turn and the injection's
index, so a run meets the same faults every time it is started.
"""

import math
import random
import threading
import time
from collections.abc import Awaitable

from rollart.config.injection import Injection
from rollart.ports.environment import AnyTextEnvironment, TextStep
from rollart.types.errors import EnvironmentFault
from rollart.types.messages import Reset
from rollart.types.trajectory import Prompt


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
        if own.latency_ms:
            time.sleep(own.latency_ms / 1000 * math.exp(waits))
        if not self._bad:
            return
        if hung:
            threading.Event().wait(own.hang_s)
        if own.raise_every and self._turn and self._turn % own.raise_every == 0:
            raise EnvironmentFault(f"injected at turn {self._turn}: raise_every is {own.raise_every}")


def hangs(injection: Injection, seed: int, member: int, turn: int, number: int = 0) -> bool:
    """Whether this turn of an episode hangs, if its slot is affected; turn 0 is the reset."""
    return _chance(number, seed, member, turn).random() < injection.hang_share


def _chance(number: int, seed: int, member: int, turn: int) -> random.Random:
    """Every injection has its own random stream, so that two of them do not hang in the same turns."""
    return random.Random(f"{number}/{seed}/{member}/{turn}")
