"""Tiny simulated worlds, and faults scripted at the port boundary.

`run` puts the real control plane over the simulated workers; between the two sits a `FaultyRuntime`, which asks a list
of rules what becomes of every command and every event. A rule sees messages, workers and the virtual clock, nothing of
the control plane.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import rollart.control.pipeline as pipeline_module
from rollart.control.context import Context
from rollart.control.pipeline import OnStep, run_pipeline
from rollart.control.rollout import OnTrajectoryEnd, ignore_trajectory
from rollart.observe.journal import MemoryJournal
from rollart.ports.runtime import Listener, Runtime
from rollart.sim.loop import run_virtual
from rollart.sim.run import parts
from rollart.sim.scenario import Scenario, parse_scenario
from rollart.types.errors import RollartError, RuntimeLost
from rollart.types.ids import WorkerId
from rollart.types.journal import JournalEvent
from rollart.types.messages import Role, WorkerCommand, WorkerEvent, WorkerInfo
from rollart.types.placement import NOTHING, Needs, Node

MODES = ("sync", "sync_plus", "one_off", "areal", "rollart")

GAME: dict[str, Any] = {
    "prompt_tokens": 40,
    "observation_tokens": {"kind": "uniform", "low": 5, "high": 20},
    "answer_tokens": {"kind": "lognormal", "median": 40, "sigma": 0.8, "max": 200},
    "turns": {"kind": "uniform", "low": 1, "high": 6},
    "reset_s": {"kind": "uniform", "low": 0.02, "high": 0.2},
    "step_s": {"kind": "uniform", "low": 0.01, "high": 0.1},
    "reward_s": 0.05,
}
TABLES: dict[str, Any] = {
    "name": "tiny",
    "steps": 4,
    "batch": {"trajectories": 8, "group_size": 4},
    "tasks": {"game": {"environments": 12, "max_turn_tokens": 128, "max_context": 2000}},
    "pools": {"wide": {"engines": 2}},
    "sim": {
        "model": "tiny",
        "engine": {"slots": 4, "max_context": 2000, "pull_gb_s": 1.0, "progress_interval_s": 0.05},
        "trainer": {"hardware": "fast", "ranks": 4, "push_gb_s": 0.5},
        "reward": {"serverless": True},
        "tasks": {"game": GAME},
    },
}
MATH: dict[str, Any] = GAME | {"turns": 1, "answer_tokens": {"kind": "uniform", "low": 20, "high": 120}}


SNAIL = "{name='snail', tflops=0.02, hbm_gb=1.0, hbm_tb_s=0.01, nvlink_gb_s=10.0, cost=1.0}"
"""Hardware for a trainer that is the bottleneck."""


def world(*assignments: str) -> Scenario:
    """One task on two engines; batches of two groups of four."""
    return parse_scenario(TABLES, assignments)


def two_tasks(*assignments: str) -> Scenario:
    """As `world`, with a second task and a second hardware class; one group of each task per batch."""
    tables = TABLES | {
        "tasks": {
            "game": TABLES["tasks"]["game"] | {"hardware": "wide"},
            "math": TABLES["tasks"]["game"] | {"hardware": "fast"},
        },
        "pools": {"wide": {"engines": 2}, "fast": {"engines": 1}},
        "sim": TABLES["sim"] | {"tasks": {"game": GAME, "math": MATH}},
    }
    return parse_scenario(tables, assignments)


# --- rules ----------------------------------------------------------------------------------------------------------


class Rule:
    """What becomes of commands and events; by default nothing."""

    def start(self, runtime: "FaultyRuntime") -> None:
        """The run is about to begin: keep the runtime, set timers."""

    def spawn_delay_s(self, worker: WorkerId) -> float:  # noqa: ARG002
        return 0.0

    def command(self, worker: WorkerId, command: WorkerCommand) -> Sequence[WorkerCommand]:  # noqa: ARG002
        return (command,)

    def event(self, worker: WorkerId, event: WorkerEvent) -> Sequence[tuple[float, WorkerEvent]]:  # noqa: ARG002
        """What arrives instead, each with a delay. A delayed event holds up those that follow it."""
        return ((0.0, event),)


class Kill(Rule):
    """The incarnations of a place that live at these times die."""

    def __init__(self, place: str, *times_s: float) -> None:
        self._place = place
        self._times_s = times_s

    def start(self, runtime: "FaultyRuntime") -> None:
        for at in self._times_s:
            runtime.loop.call_at(at, runtime.kill_place, self._place)


class KillAtCommand(Rule):
    """A worker of a place dies of its nth command of a kind, `after_s` later; again in every incarnation if asked."""

    def __init__(
        self,
        place: str,
        kind: type,
        number: int,
        *,
        after_s: float = 0.0,
        incarnations: int = 1,
    ) -> None:
        self._place, self._kind, self._number = place, kind, number
        self._after_s, self._incarnations = after_s, incarnations
        self._seen: dict[WorkerId, int] = {}

    def start(self, runtime: "FaultyRuntime") -> None:
        self._runtime = runtime

    def command(self, worker: WorkerId, command: WorkerCommand) -> Sequence[WorkerCommand]:
        if place(worker).startswith(self._place) and isinstance(command, self._kind):
            if worker not in self._seen and len(self._seen) == self._incarnations:
                return (command,)
            self._seen[worker] = self._seen.get(worker, 0) + 1
            if self._seen[worker] == self._number:
                self._runtime.loop.call_later(self._after_s, self._runtime.kill, worker, "killed")
        return (command,)


class Silent(Rule):
    """One incarnation hears and says nothing any more from a time on, and stays alive."""

    def __init__(self, worker: str, at: float) -> None:
        self._worker = WorkerId(worker)
        self._at = at

    def start(self, runtime: "FaultyRuntime") -> None:
        self._now = runtime.loop.time

    def command(self, worker: WorkerId, command: WorkerCommand) -> Sequence[WorkerCommand]:
        return () if worker == self._worker and self._now() >= self._at else (command,)

    def event(self, worker: WorkerId, event: WorkerEvent) -> Sequence[tuple[float, WorkerEvent]]:
        return () if worker == self._worker and self._now() >= self._at else ((0.0, event),)


class LateJoin(Rule):
    """Incarnations of a place take so long to start; `math.inf`: they never do."""

    def __init__(self, place: str, seconds: float, *, first: int = 0) -> None:
        self._place, self._seconds, self._first = place, seconds, first

    def spawn_delay_s(self, worker: WorkerId) -> float:
        number = int(worker.rpartition(".")[2])
        return self._seconds if place(worker).startswith(self._place) and number >= self._first else 0.0


class Events(Rule):
    """Events of a kind from a place become what `change(worker, event, n)` says; n counts from 1."""

    def __init__(
        self,
        place: str,
        kind: type,
        change: Callable[[WorkerId, Any, int], Sequence[WorkerEvent | tuple[float, WorkerEvent]]],
    ) -> None:
        self._place, self._kind, self._change = place, kind, change
        self.count = 0

    def event(self, worker: WorkerId, event: WorkerEvent) -> Sequence[tuple[float, WorkerEvent]]:
        if not (place(worker).startswith(self._place) and isinstance(event, self._kind)):
            return ((0.0, event),)
        self.count += 1
        changed = self._change(worker, event, self.count)
        return [item if isinstance(item, tuple) else (0.0, item) for item in changed]


class Commands(Rule):
    """As `Events`, for commands."""

    def __init__(self, place: str, kind: type, change: Callable[[WorkerId, Any, int], Sequence[WorkerCommand]]) -> None:
        self._place, self._kind, self._change = place, kind, change
        self.count = 0

    def command(self, worker: WorkerId, command: WorkerCommand) -> Sequence[WorkerCommand]:
        if not (place(worker).startswith(self._place) and isinstance(command, self._kind)):
            return (command,)
        self.count += 1
        return self._change(worker, command, self.count)


def dropped(_worker: WorkerId, _message: Any, _number: int) -> Sequence[Any]:
    return ()


def doubled(_worker: WorkerId, message: Any, _number: int) -> Sequence[Any]:
    return (message, message)


class Echo(Rule):
    """A copy of every event of a kind arrives again later, out of order."""

    def __init__(self, kind: type, after_s: float) -> None:
        self._kind, self._after_s = kind, after_s

    def start(self, runtime: "FaultyRuntime") -> None:
        self._runtime = runtime

    def event(self, worker: WorkerId, event: WorkerEvent) -> Sequence[tuple[float, WorkerEvent]]:
        if isinstance(event, self._kind):
            self._runtime.loop.call_later(self._after_s, self._runtime.deliver, worker, [event])
        return ((0.0, event),)


class Tap(Rule):
    """Changes nothing and remembers everything: (time, worker, message)."""

    def __init__(self) -> None:
        self.both: list[tuple[float, WorkerId, WorkerCommand | WorkerEvent]] = []

    def start(self, runtime: "FaultyRuntime") -> None:
        self._now = runtime.loop.time

    def command(self, worker: WorkerId, command: WorkerCommand) -> Sequence[WorkerCommand]:
        self.both.append((self._now(), worker, command))
        return (command,)

    def event(self, worker: WorkerId, event: WorkerEvent) -> Sequence[tuple[float, WorkerEvent]]:
        self.both.append((self._now(), worker, event))
        return ((0.0, event),)

    def of(self, kind: type[Any]) -> list[tuple[float, WorkerId, Any]]:
        return [item for item in self.both if isinstance(item[2], kind)]


def place(worker: WorkerId) -> str:
    """`engine/wide/0` of `engine/wide/0.1`."""
    return worker.rpartition(".")[0]


# --- the runtime between ----------------------------------------------------------------------------------------------


class FaultyRuntime:
    """A Runtime around another one, with rules for everything that passes."""

    def __init__(self, inner: Runtime, rules: Sequence[Rule]) -> None:
        self.loop = asyncio.get_running_loop()
        self.killed: list[WorkerId] = []
        self._inner = inner
        self._rules = rules
        self._listener: Listener | None = None
        self._alive: dict[WorkerId, None] = {}
        self._held: dict[WorkerId, float] = {}
        """Until when a delayed event holds up the later ones of its worker."""
        for rule in rules:
            rule.start(self)

    def listen(self, listener: Listener) -> None:
        self._listener = listener
        self._inner.listen(self)

    def spawn(
        self,
        worker: WorkerId,
        role: Role,
        factory: str,
        settings: Mapping[str, Any],
        *,
        python: str = "",
        needs: Needs = NOTHING,  # noqa: ARG002 - nothing is reserved
    ) -> None:
        assert not python
        self._alive[worker] = None
        delay_s = sum(rule.spawn_delay_s(worker) for rule in self._rules)
        if delay_s == 0.0:
            self._inner.spawn(worker, role, factory, settings)
        elif delay_s < float("inf"):
            self.loop.call_later(delay_s, self._spawn_late, worker, role, factory, settings)

    def _spawn_late(self, worker: WorkerId, role: Role, factory: str, settings: Mapping[str, Any]) -> None:
        if worker in self._alive:
            self._inner.spawn(worker, role, factory, settings)

    def post(self, worker: WorkerId, commands: Sequence[WorkerCommand]) -> None:
        passed = list(commands)
        for rule in self._rules:
            passed = [out for command in passed for out in rule.command(worker, command)]
        if passed:
            self._inner.post(worker, passed)

    def stop(self, worker: WorkerId) -> None:
        self._alive.pop(worker, None)
        self._inner.stop(worker)

    async def close(self) -> None:
        self._alive.clear()
        await self._inner.close()

    # What rules do.

    def kill(self, worker: WorkerId, reason: str) -> None:
        """SIGKILL: nothing more is heard but the death."""
        if worker in self._alive and self._listener is not None:
            self.stop(worker)
            self.killed.append(worker)
            self._listener.died(worker, reason)

    def kill_place(self, name: str) -> None:
        for worker in list(self._alive):
            if place(worker).startswith(name):
                self.kill(worker, "killed")

    def drain(self, name: str) -> None:
        """The nodes of these workers drain."""
        for worker in list(self._alive):
            if place(worker).startswith(name):
                self.leaves(worker, "its node drains")

    def deliver(self, worker: WorkerId, events: Sequence[WorkerEvent]) -> None:
        if worker in self._alive and self._listener is not None:
            self._listener.events(worker, events)

    # What the inner runtime tells.

    def waits(self, worker: WorkerId, why: str) -> None:
        raise NotImplementedError

    def placed(self, worker: WorkerId, node: str, why: str) -> None:
        raise NotImplementedError

    def leaves(self, worker: WorkerId, why: str) -> None:
        if worker in self._alive and self._listener is not None:
            self._listener.leaves(worker, why)

    def nodes_seen(self, nodes: Sequence[Node]) -> None:
        raise NotImplementedError

    def joined(self, worker: WorkerId, info: WorkerInfo) -> None:
        if worker in self._alive and self._listener is not None:
            self._listener.joined(worker, info)

    def events(self, worker: WorkerId, events: Sequence[WorkerEvent]) -> None:
        now = self.loop.time()
        passed: list[tuple[float, WorkerEvent]] = [(0.0, event) for event in events]
        for rule in self._rules:
            passed = [(wait + more, out) for wait, event in passed for more, out in rule.event(worker, event)]
        at_once: list[WorkerEvent] = []
        for delay_s, event in passed:
            at = max(now + delay_s, self._held.get(worker, 0.0))
            if at <= now:
                at_once.append(event)
            else:
                self._held[worker] = at
                self.loop.call_at(at, self.deliver, worker, [event])
        if at_once:
            self.deliver(worker, at_once)

    def died(self, worker: WorkerId, reason: str) -> None:
        if self._alive.pop(worker, 0) is None and self._listener is not None:
            self._listener.died(worker, reason)

    def failed(self, error: RuntimeLost) -> None:
        if self._listener is not None:
            self._listener.failed(error)


class SlowSink(MemoryJournal):
    """A journal whose disk takes its time. `flushed` holds, per flush, how many events were durable when it ended."""

    def __init__(self, flush_s: float) -> None:
        super().__init__()
        self._flush_s = flush_s
        self.flushed: list[int] = []

    async def flush(self) -> None:
        count = len(self.events)
        await asyncio.sleep(self._flush_s)
        self.flushed.append(count)


# --- running ----------------------------------------------------------------------------------------------------------


class Ran(NamedTuple):
    """A run that is over, and what it left behind."""

    events: list[JournalEvent]
    error: BaseException | None
    killed: list[WorkerId]
    context: Context
    tasks_left: list[str]
    complaints: list[str]
    """What the loop's exception handler was told: an error that nobody owned."""

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def run(
    scenario: Scenario,
    *rules: Rule,
    sink: MemoryJournal | None = None,
    ended: OnTrajectoryEnd = ignore_trajectory,
    on_step: OnStep | None = None,
) -> Ran:
    """Run a scenario to its end under the rules, in virtual time."""
    journal = sink or MemoryJournal()
    contexts: list[Context] = []
    killed: list[WorkerId] = []
    left: list[str] = []
    complaints: list[str] = []

    class KeptContext(Context):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            contexts.append(self)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(str(context)))
        base = parts(scenario, journal)
        runtime = FaultyRuntime(base.runtime, rules)
        try:
            await run_pipeline(
                scenario.config,
                dataclasses.replace(base, runtime=runtime, sink=journal, on_trajectory_end=ended, on_step=on_step),
            )
        finally:
            killed.extend(runtime.killed)
            left.extend(task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task())

    error: BaseException | None = None
    pipeline_module.Context = KeptContext  # type: ignore[misc]
    try:
        run_virtual(main())
    except RollartError as stopped:
        error = stopped
    finally:
        pipeline_module.Context = Context  # type: ignore[misc]
    return Ran(journal.events, error, killed, contexts[0], left, complaints)
