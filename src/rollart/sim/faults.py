"""Faults at the port boundary: a worker that behaves like the inner one, except for planned faults.

Every fault is drawn from a seed, belongs to a row of the table of faults a run must survive, and counts its injections.
Neither the inner worker nor the control plane knows of it.

    row    what is injected
    1–3    an engine is killed while idle, is killed while busy, freezes
    4      every engine is killed, and none comes back
    5      an engine starts late
    6–8    an environment hangs, dies with its worker, silently loses its state
    9      out of memory: the agent's own limit, or the host's
    10     an environment answers too late
    11     a thousand environments at once (a property of the world)
    12–14  a reward hangs; fails for a while or answers twice; answers nonsense
    15–16  the trainer is killed after a step, or while it saves; its disk is full
    17–18  an answer is lost, or comes twice
    19     the trainer is far slower
    20–21  a sync is cut halfway, a tensor is damaged
    22–23  the trainer, the controller, restart from a checkpoint
    24     the link loses, duplicates and delays packets (`sim.lossy`)
    33     nodes drain (`fuzz.Drain`)
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from rollart.ports.factory import load
from rollart.ports.worker import Advance, Worker
from rollart.sim.draws import uniform
from rollart.types.ids import RequestId
from rollart.types.messages import (
    Add,
    EnvironmentFailed,
    Observed,
    PrefixMiss,
    Refused,
    Save,
    SaveFailed,
    Scored,
    ScoreFailed,
    ScoreRequest,
    Stage,
    Step,
    Trained,
    TurnDone,
    Update,
    Updated,
    WorkerCommand,
    WorkerEvent,
    WorkerInfo,
)

Kind = Literal[
    "absent", "blank", "corrupt", "double", "fail", "freeze", "full_disk", "hang", "kill", "late", "limit", "nonsense"
]

MESSAGES: dict[str, type] = {
    message.__name__: message
    for message in (Add, Observed, Save, ScoreRequest, Scored, Stage, Step, Trained, TurnDone, Update, Updated)
}
FACTORY = "rollart.sim.faults:FaultyWorker"


class Fault(NamedTuple):
    """One fault at the workers of one spec.

    `on` names the message that triggers it; without one it happens at `at_s`. The first `skip` triggers are spared; of
    the others `share` are hit, at most `limit` of them. `for_s` is how long it lasts, how late an answer is, or how
    long after an answer the worker is killed.
    """

    row: int
    kind: Kind
    target: str
    on: str = ""
    at_s: float = 0.0
    for_s: float = math.inf
    share: float = 1.0
    skip: int = 0
    limit: int = 1
    incarnations: int = 1
    """Number of incarnations of the spec that it hits."""
    once_struck: int = 0
    """Only after a fault of this row has struck; 0: unconditionally."""


class Injections:
    """Actual injections by row, and how often each fault has struck."""

    def __init__(self) -> None:
        self.rows: Counter[int] = Counter()
        self.struck: Counter[int] = Counter()
        self.spared: Counter[int] = Counter()
        self.incarnations: Counter[str] = Counter()


class Killed(Exception):
    """The worker process was killed."""


def with_faults(
    name: str, factory: str, settings: Mapping[str, Any], faults: Sequence[Fault], injections: Injections, seed: int
) -> tuple[str, dict[str, Any]]:
    """Factory and settings of a worker of spec `name`, wrapped with its faults.

    A target that ends in `/` matches every spec below it; any other is the name of one.
    """
    mine = [
        (number, fault)
        for number, fault in enumerate(faults)
        if name == fault.target or (fault.target.endswith("/") and name.startswith(fault.target))
    ]
    return FACTORY, {
        "name": name,
        "factory": factory,
        "settings": settings,
        "faults": mine,
        "injections": injections,
        "seed": seed,
    }


class FaultyWorker:
    """A worker with injected faults; see the module docstring."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:
        self._build: Callable[[], Worker] = lambda: load(settings["factory"])(settings["settings"], wake)
        self._injections: Injections = settings["injections"]
        self._seed: int = settings["seed"]
        name: str = settings["name"]
        incarnation = self._injections.incarnations[name]
        self._injections.incarnations[name] += 1
        self._faults: list[tuple[int, Fault]] = [
            (number, fault) for number, fault in settings["faults"] if incarnation < fault.incarnations
        ]
        self._draws = 0
        self._key = incarnation
        self._held: list[tuple[float, int, WorkerEvent]] = []
        """Delayed events, by due time."""
        self._frozen_until = -math.inf
        self._doomed_at = math.inf
        self._mailbox: list[WorkerCommand] = []
        self._working: set[RequestId] = set()
        for number, fault in self._faults:
            if fault.kind == "absent" and self._strikes(number, fault):
                raise Killed("it did not come up")
        self._inner: Worker = self._build()

    def info(self) -> WorkerInfo:
        return self._inner.info()

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._mailbox.extend(commands)

    def close(self) -> None:
        self._inner.close()

    def advance(self, now: float) -> Advance:
        timers = self._timed_faults(now)
        if now < self._frozen_until:
            return Advance([], None if math.isinf(self._frozen_until) else self._frozen_until)
        commands, self._mailbox = self._mailbox, []
        passed = [let for let in map(self._command, commands) if let is not None]
        if passed:
            self._inner.post(passed)
        advance = self._inner.advance(now)
        out: list[WorkerEvent] = []
        for event in advance.events:
            self._event(event, now, out)
        while self._held and self._held[0][0] <= now:
            out.append(heapq.heappop(self._held)[2])
        held_until = self._held[0][0] if self._held else None
        wakes = [
            at for at in (advance.wake_at, held_until, self._doomed_at, *timers) if at is not None and at < math.inf
        ]
        return Advance(out, min(wakes, default=None))

    # --- injection --------------------------------------------------------------------------------------------------

    def _timed_faults(self, now: float) -> list[float]:
        """Act on faults that are due; returns the times of those to come."""
        later = []
        if now >= self._doomed_at:
            raise Killed("it was killed")
        if self._doomed_at < math.inf:
            later.append(self._doomed_at)
        for number, fault in self._faults:
            if fault.on or fault.kind not in ("kill", "freeze", "blank"):
                continue
            if now < fault.at_s:
                later.append(fault.at_s)
            elif self._ripe(fault) and self._strikes(number, fault):
                if fault.kind == "kill":
                    raise Killed("it was killed")
                if fault.kind == "freeze":
                    self._frozen_until = now + fault.for_s
                else:
                    self._inner.close()
                    self._inner = self._build()
        return later

    def _ripe(self, fault: Fault) -> bool:
        """Row 1 needs an idle engine, rows 2 and 3 a busy one."""
        if fault.row == 1:
            return not self._working
        return fault.row not in (2, 3) or bool(self._working)

    def _command(self, command: WorkerCommand) -> WorkerCommand | None:
        """The command as it reaches the worker; None if it does not."""
        if isinstance(command, Add):
            self._working.add(command.request)
        for number, fault in self._faults:
            if fault.on and isinstance(command, MESSAGES[fault.on]) and self._strikes(number, fault):
                if fault.kind == "kill":
                    raise Killed(f"it was killed by {fault.on}")
                if fault.kind == "hang":
                    return None
                if fault.kind == "full_disk" and isinstance(command, Save):
                    self._answer(SaveFailed(command.version, "the disk is full"))
                    return None
                if fault.kind == "fail" and isinstance(command, ScoreRequest):
                    self._answer(ScoreFailed(command.key, "503: try again", retry=True))
                    return None
                if fault.kind == "corrupt" and isinstance(command, Stage):
                    damaged = msgspec.structs.replace(
                        command.manifest, digests=("0" * 32, *command.manifest.digests[1:])
                    )
                    command = Stage(damaged)
        return command

    def _answer(self, event: WorkerEvent) -> None:
        heapq.heappush(self._held, (-math.inf, self._tick(), event))

    def _event(self, event: WorkerEvent, now: float, out: list[WorkerEvent]) -> None:
        if isinstance(event, TurnDone | PrefixMiss | Refused):
            self._working.discard(event.request)
        for number, fault in self._faults:
            if not fault.on or not isinstance(event, MESSAGES[fault.on]):
                continue
            if fault.kind == "limit" and not (isinstance(event, Observed) and event.turn):
                continue  # the agent has not acted yet, so it cannot hit a limit
            if not self._strikes(number, fault):
                continue
            if fault.kind == "kill":
                if math.isinf(fault.for_s):
                    raise Killed(f"it was killed after {fault.on}")
                self._doomed_at = now + fault.for_s
            if fault.kind == "hang":
                return
            if fault.kind == "late":
                heapq.heappush(self._held, (now + fault.for_s, self._tick(), event))
                return
            if fault.kind == "double":
                out.append(event)
            elif fault.kind == "nonsense" and isinstance(event, Scored):
                nonsense: Any = (math.nan, math.inf, "ten")[self._tick() % 3]
                event = msgspec.structs.replace(event, values=(nonsense, *event.values[1:]))
            elif fault.kind == "limit" and isinstance(event, Observed):
                event = self._out_of_memory(event)
        out.append(event)

    def _out_of_memory(self, event: Observed) -> WorkerEvent:
        """In the agent's own sandbox: its result. On the host: a failure of the environment."""
        if self._tick() % 2:
            return msgspec.structs.replace(event, done=True, truncated=True, reward=0.0)
        return EnvironmentFailed(event.episode, event.turn, "the host ran out of memory")

    def _strikes(self, number: int, fault: Fault) -> bool:
        if self._injections.struck[number] >= fault.limit:
            return False
        if fault.once_struck and not self._injections.rows[fault.once_struck]:
            return False
        if self._injections.spared[number] < fault.skip:
            self._injections.spared[number] += 1
            return False
        if fault.share < 1.0 and uniform(self._seed, number, self._key, self._tick()) >= fault.share:
            return False
        self._injections.struck[number] += 1
        self._injections.rows[fault.row] += 1
        return True

    def _tick(self) -> int:
        self._draws += 1
        return self._draws
