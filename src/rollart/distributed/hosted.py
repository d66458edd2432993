"""Runs an engine or trainer of rollart inside a custom `Worker`: commands in, answers out, one call at a time.

    engine = Hosted("rollart.backends.engines.torch_engine:TorchEngine", model=…, store=…, pool=PoolSettings())
    engine.ask([Stage(manifest)], Staged)
    engine.ask([Update(manifest.version)], Updated)
    done = engine.ask([Add(…), Add(…)], TurnDone, 2)

Messages are those of `types.messages`. A command that fails raises `RunError` with the reason.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from rollart.ports.factory import load
from rollart.types.errors import RunError
from rollart.types.messages import Refused, StageFailed, TrainerFailed, WorkerCommand

A = TypeVar("A")

FAILURES = (Refused, StageFailed, TrainerFailed)
ANSWER_S = 600.0


class Hosted:
    """A worker of a port (`ports.worker`), driven by the thread that asks."""

    def __init__(self, factory: str, /, **settings: Any) -> None:
        self._woken = threading.Event()
        self._worker = load(factory)(settings, self._woken.set)

    def ask(
        self, commands: Sequence[WorkerCommand], answer: type[A], count: int = 1, timeout_s: float = ANSWER_S
    ) -> list[A]:
        """Post commands and drive the worker until it has given `count` answers; other events are dropped."""
        self._worker.post(commands)
        deadline = time.monotonic() + timeout_s
        found: list[A] = []
        while len(found) < count:
            self._woken.clear()
            advance = self._worker.advance(time.monotonic())
            for event in advance.events:
                if isinstance(event, FAILURES):
                    raise RunError(f"{type(self._worker).__name__}: {event.reason}")
                if isinstance(event, answer):
                    found.append(event)
            if len(found) < count:
                self._rest(advance.wake_at, deadline)
        return found

    def close(self) -> None:
        self._worker.close()

    def _rest(self, wake_at: float | None, deadline: float) -> None:
        now = time.monotonic()
        if now > deadline:
            raise RunError(f"{type(self._worker).__name__} has not answered in time")
        until = deadline if wake_at is None else min(wake_at, deadline)
        if until > now:
            self._woken.wait(until - now)
