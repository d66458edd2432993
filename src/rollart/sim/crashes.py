"""Run a world to its end, through every crash of its controller, and audit the result."""

import asyncio
import dataclasses
from collections import Counter
from typing import NamedTuple

from rollart.control.pipeline import Parts, run_pipeline
from rollart.observe.audit import Violation, audit
from rollart.observe.journal import digest
from rollart.policy.lineage import replay
from rollart.sim.checkpoints import SimCheckpoints
from rollart.sim.draws import uniform
from rollart.sim.faults import Injections, with_faults
from rollart.sim.fuzz import World
from rollart.sim.loop import VirtualLoop, cancel_rest
from rollart.sim.lossy import LossyRuntime
from rollart.sim.run import parts
from rollart.sim.runtime import VirtualRuntime
from rollart.sim.scenario import Scenario, parse_scenario
from rollart.types.errors import NoEngine, StalledRun, WorkerLost
from rollart.types.failures import StopReason
from rollart.types.journal import JournalEvent, RunEnded, StepTrained, TrajectoryStarted, WorkerDied
from rollart.types.messages import Role
from rollart.types.snapshot import RunState

ALL_DEAD_WITHIN_S = 60.0
MAX_SECONDS = 50_000.0


class Fuzzed(NamedTuple):
    """The result of a world: what happened in it, and the rules it broke."""

    world: World
    events: list[JournalEvent]
    violations: list[Violation]
    injected: Counter[int]
    steps: int
    trajectories: int
    digest: str


class CrashableJournal:
    """Events in memory; a crash keeps flushed events and part of the unflushed ones."""

    def __init__(self, before: list[JournalEvent]) -> None:
        self.events = list(before)
        self._durable = len(before)
        self._written: int | None = None
        self.append = self.events.append

    async def flush(self) -> None:
        if self._written is None:
            self._durable = len(self.events)

    async def close(self) -> None:
        await self.flush()

    def crash(self) -> None:
        """Discard everything appended from here on."""
        self._written = len(self.events)

    def survived(self, share: float) -> list[JournalEvent]:
        """Events after a crash: all durable ones, and this share of the rest."""
        written = len(self.events) if self._written is None else self._written
        return self.events[: self._durable + int(share * (written - self._durable + 1))]


def run_world(world: World) -> Fuzzed:
    """Run, crash, resume and audit."""
    scenario = parse_scenario(world.tables)
    injections, checkpoints = Injections(), SimCheckpoints()
    events: list[JournalEvent] = []
    state: RunState | None = None
    error: BaseException | None = None
    deaths = [*world.controller_dies_at_s, None]
    for number, dies_at_s in enumerate(deaths):
        journal = CrashableJournal(events)
        crashed, error = _run_once(world, scenario, journal, injections, checkpoints, state, dies_at_s)
        events = journal.events
        if not crashed:
            break
        injections.rows[23] += 1
        events = journal.survived(uniform(world.seed, 23, number))
        state = replay(events) if events else None
    if any(settings.environments >= 1000 for settings in scenario.config.tasks.values()):
        injections.rows[11] += 1
    violations = [*audit(events), *_judge(world, events, error)]
    steps = sum(isinstance(event, StepTrained) for event in events)
    trajectories = sum(isinstance(event, TrajectoryStarted) for event in events)
    return Fuzzed(world, events, violations, injections.rows, steps, trajectories, digest(events))


def _run_once(
    world: World,
    scenario: Scenario,
    journal: CrashableJournal,
    injections: Injections,
    checkpoints: SimCheckpoints,
    state: RunState | None,
    dies_at_s: float | None,
) -> tuple[bool, BaseException | None]:
    """Run one controller until it ends (False and its error) or is killed (True)."""
    loop = VirtualLoop()

    async def main() -> None:
        await run_pipeline(scenario.config, _parts(world, scenario, journal, injections, checkpoints), state)

    try:
        task = loop.create_task(main(), name="controller")
        task.add_done_callback(lambda _: loop.stop())
        loop.call_at(MAX_SECONDS if dies_at_s is None else dies_at_s, loop.stop)
        asyncio.set_event_loop(loop)
        loop.run_forever()
        if task.done():
            return False, task.exception()
        journal.crash()
        cancel_rest(loop)
        if dies_at_s is None:
            return False, StalledRun(f"not over after {MAX_SECONDS:g} s of virtual time")
        return True, None
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _parts(
    world: World, scenario: Scenario, journal: CrashableJournal, injections: Injections, checkpoints: SimCheckpoints
) -> Parts:
    plain = parts(scenario, journal, checkpoints)
    workers = []
    for spec in plain.workers:
        factory, settings = with_faults(spec.name, spec.factory, spec.settings, world.faults, injections, world.seed)
        workers.append(dataclasses.replace(spec, factory=factory, settings=settings))
    nodes = scenario.world.nodes
    runtime = VirtualRuntime(nodes) if world.link is None else LossyRuntime(world.link, injections, nodes)

    def drain(target: str) -> None:
        injections.rows[33] += runtime.drain(target)

    for at_s, target in world.drains:
        asyncio.get_running_loop().call_at(at_s, drain, target)
    return dataclasses.replace(plain, runtime=runtime, workers=workers)


def _judge(world: World, events: list[JournalEvent], error: BaseException | None) -> list[Violation]:
    """Check that the run ended as it must: done, or, if all engines were lost, with the right error and in time."""
    last = len(events) - 1
    if not world.fatal:
        return [] if error is None else [Violation(8, last, f"the run failed: {type(error).__name__}: {error}")]
    ended = events[-1] if events else None
    if error is None:
        done = isinstance(ended, RunEnded) and ended.stop is StopReason.DONE
        return [] if done else [Violation(8, last, "the run ended without an error and without its steps")]
    if not isinstance(error, NoEngine | WorkerLost):
        return [Violation(8, last, f"all engines died and the run ended with {type(error).__name__}: {error}")]
    died = [event for event in events if isinstance(event, WorkerDied)]
    deaths = [event.at for event in died if event.worker.startswith(Role.ENGINE.value)]
    if ended is None or not deaths or ended.at - deaths[-1] > ALL_DEAD_WITHIN_S:
        return [Violation(8, last, f"the run noticed too late that all engines are dead: {error}")]
    return []
