"""An engine that generates in the worker's own thread: one `advance` is one step; commands act between steps.

Invariants: every `advance` takes a step while there are turns and the engine is not suspended, unless a version became
ready, which is reported first.
"""

import time
from abc import abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

from rollart.backends.engines.sessions import Session, Sessions, Turn
from rollart.backends.engines.shell import EngineShell, Steps
from rollart.backends.engines.staging import Staging
from rollart.backends.engines.work import WorkMeter
from rollart.ports.worker import Advance
from rollart.types.messages import EngineInfo, TurnDone, WorkerEvent
from rollart.types.versions import Version
from rollart.types.weights import Manifest

S = TypeVar("S", bound=Session)
T = TypeVar("T", bound=Turn)
W = TypeVar("W")


class SteppedEngine(EngineShell[S, T], Generic[S, T, W]):
    """Loop of such an engine. `W` is the type of its weights, as prepared by its `Staging`."""

    def __init__(
        self,
        info: EngineInfo,
        sessions: Sessions[S],
        staging: Staging[W],
        *,
        vocabulary: int,
        version: Version | None = None,
    ) -> None:
        super().__init__(info, sessions, vocabulary=vocabulary, version=version)
        self._staging = staging
        self._steps = 0
        self._stepping_s = 0.0
        self._recompute_s = 0.0
        """Part of `_stepping_s`, maintained by `_step`; all three count since the last report."""
        self._work = WorkMeter()
        """Work by task since then; an engine that measures it fills it in `_step`."""

    @abstractmethod
    def _step(self) -> Iterable[TurnDone]:
        """Generate tokens, and return the turns that ended. Called only while there are turns."""

    def advance(self, now: float) -> Advance:
        events: list[WorkerEvent] = []
        began = time.perf_counter()
        self._obey_commands(events)
        obeyed = time.perf_counter()
        # After the commands, so that the pull overlaps with the step.
        staged = self._staging.slice() if self._staging.due else None
        if staged is not None:
            # Reported before the step, because training may be waiting for it.
            self._note([staged], events)
        elif self._active():
            began += time.perf_counter() - obeyed
            self._note(self._step(), events)
            self._steps += 1
            self._stepping_s += time.perf_counter() - began
        self._report(now, events)
        return Advance(events, now if self._active() or self._staging.due else None)

    def close(self) -> None:
        super().close()
        self._staging.close()

    def _fetch(self, manifest: Manifest) -> None:
        self._staging.begin(manifest)

    def _steps_taken(self) -> Steps:
        taken = Steps(self._steps, self._stepping_s, self._recompute_s, self._work.take())
        self._steps = 0
        self._stepping_s = self._recompute_s = 0.0
        return taken
