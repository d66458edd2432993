"""LLMProxy: the gateway between agents and engines.

Turns arrive per trajectory and go to the engine that the router selects, with only the new tokens. If the engine is
lost, the turn continues elsewhere from the last reported token; if no engine can take it, the turn is queued until one
can or its deadline passes. Every turn ends exactly once: its future gets a result or a fault.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from rollart.control.affinity import AutomaticAffinity
from rollart.control.context import Context
from rollart.control.fleet import Fleet, WorkerSpec
from rollart.policy.routing import Router
from rollart.policy.watch import Wait
from rollart.types.errors import EngineFault, InvariantBroken, NoEngine
from rollart.types.ids import RequestId, TrajectoryId, WorkerId
from rollart.types.journal import Placed, TurnAborted
from rollart.types.messages import (
    Abort,
    Add,
    EndSession,
    EngineInfo,
    FinishReason,
    PrefixMiss,
    Progress,
    Refused,
    Role,
    Sampling,
    TurnDone,
    WorkerInfo,
)
from rollart.types.tokens import NOTHING, Generated, concatenate
from rollart.types.trajectory import Trajectory
from rollart.types.versions import Version


class TurnResult(msgspec.Struct, frozen=True, gc=False):
    """A finished turn: what was sampled, where, and at what cost in tokens."""

    generated: Generated
    finish: FinishReason
    engine: WorkerId
    prefilled: int
    cached: int
    recomputed: int


class FirstTokenObserver(Protocol):
    """Notified once per trajectory of the version of its first token, as soon as an engine reports it."""

    def first_token(self, trajectory: Trajectory, version: Version) -> None: ...


class _Session:
    """State of a trajectory at the engines: the one that caches its prefix, and its current turn, if any."""

    __slots__ = ("engine", "future", "holder", "observer", "partial", "request", "sampling", "trajectory")

    sampling: Sampling
    """Sampling parameters of the current turn."""
    request: RequestId
    """Id of the current turn at `engine`."""

    def __init__(self, trajectory: Trajectory, observer: FirstTokenObserver) -> None:
        self.trajectory = trajectory
        self.observer = observer
        self.holder: WorkerId | None = None
        """The engine that holds the prefix up to the last sampled token."""
        self.future: asyncio.Future[TurnResult] | None = None
        """None between turns."""
        self.engine: _Engine | None = None
        """Where the turn is; None while it waits for an engine."""
        self.partial = NOTHING
        """Tokens of the turn reported so far."""

    @property
    def last_version(self) -> Version | None:
        return self.partial.runs[-1].version if self.partial.runs else self.trajectory.last_version


class _Engine:
    """An engine as the proxy sees it."""

    __slots__ = ("aborting", "hardware", "heard_at", "in_flight", "info", "leaves", "pool", "wait", "worker")

    def __init__(
        self, worker: WorkerId, spec: WorkerSpec, info: EngineInfo, now: float, silent: Callable[[Wait], None]
    ) -> None:
        self.worker = worker
        self.pool = spec.pool
        self.hardware = spec.hardware
        self.info = info
        self.in_flight = 0
        """Number of turns at this engine."""
        self.aborting: dict[RequestId, _Session] = {}
        """Aborted requests that it has not answered: their final token count is not known."""
        self.heard_at = now
        self.leaves = False
        """It gets no new turns; those at it finish."""
        self.wait = Wait(silent)
        """Progress watchdog; open while the engine owes answers."""

    @property
    def owes(self) -> int:
        """Number of requests that it has not answered. Aborted ones count: an engine that is frozen while its requests
        are aborted one after another, because their members are replaced, would never look silent."""
        return self.in_flight + len(self.aborting)


class LLMProxy:
    """Route, suspend, resume; see the module."""

    def __init__(
        self, context: Context, fleet: Fleet, router: Router, affinity: AutomaticAffinity | None = None
    ) -> None:
        self._context = context
        self._fleet = fleet
        self._router = router
        self._affinity = affinity
        self._engines: dict[WorkerId, _Engine] = {}
        self._sessions: dict[TrajectoryId, _Session] = {}
        self._turns: dict[RequestId, _Session] = {}
        """Turns at an engine. One table: ids only grow, so entries in flight are close together in memory."""
        self._queue: deque[_Session] = deque()
        self._next_request = 0
        self._suspended = False
        self._nobody: Wait | None = None
        fleet.attach(Role.ENGINE, self)
        fleet.on(TurnDone, self._turn_done)
        fleet.on(PrefixMiss, self._prefix_miss)
        fleet.on(Refused, self._refused)
        fleet.on(Progress, self._progress)

    # Calls of episodes.

    def generate(
        self, trajectory: Trajectory, sampling: Sampling, observer: FirstTokenObserver
    ) -> "asyncio.Future[TurnResult]":
        """The trajectory's next turn, after everything in its current sequence."""
        session = self._sessions.get(trajectory.id)
        if session is None:
            session = self._sessions[trajectory.id] = _Session(trajectory, observer)
        elif session.future is not None:
            raise InvariantBroken(f"trajectory {trajectory.id} asked for a turn while it has one")
        session.sampling = sampling
        session.future = future = self._context.loop.create_future()
        if self._suspended or not self._send(session):
            self._queue.append(session)
        return future

    def in_flight(self) -> Iterator[tuple[str, str]]:
        """Task and hardware class of every turn at an engine."""
        for session in self._turns.values():
            if session.engine is not None:
                yield session.trajectory.task, session.engine.hardware

    def at_pools(self) -> Iterator[str]:
        """Pool of the engine of every turn at one."""
        for session in self._turns.values():
            if session.engine is not None:
                yield session.engine.pool

    def prefer(self, task: str, hardware: str | None) -> None:
        """Run the task's turns on this class from here on: new trajectories, and at their next turns those in
        flight."""
        self._router.prefer(task, hardware)
        for session in self._sessions.values():
            if session.trajectory.task == task:
                self._router.follow(session.trajectory.id, task)

    def generating(self, trajectory: Trajectory) -> bool:
        """Whether the trajectory has a turn at an engine or waiting for one."""
        session = self._sessions.get(trajectory.id)
        return session is not None and session.future is not None

    def end(self, trajectory: Trajectory) -> None:
        """Abort the turn of a finished trajectory, if it has one, and free its session; idempotent."""
        session = self._sessions.pop(trajectory.id, None)
        if session is not None:
            engine = session.engine
            if engine is not None:
                self._fleet.post(engine.worker, [Abort(session.request)])
                engine.aborting[session.request] = session
                self._detach(session)
            if session.holder is not None and session.holder in self._engines:
                self._fleet.post(session.holder, [EndSession(trajectory.id)])
        self._router.trajectory_ended(trajectory.id)

    # Calls of weight sync.

    def suspend(self) -> None:
        """No new requests; those in flight are kept."""
        self._suspended = True

    def resume(self) -> None:
        """Requests go out again."""
        self._suspended = False
        now = self._context.now()
        for engine in self._engines.values():
            engine.heard_at = now
        self._drain_queue()

    def serves(self, worker: WorkerId, version: Version) -> None:
        """An engine serves a version from now on."""
        engine = self._engines.get(worker)
        if engine is None:
            return
        engine.heard_at = self._context.now()
        self._fleet.succeeded(worker)
        self._router.engine_serves(worker, version)
        if self._nobody is not None:
            self._context.waits.close(self._nobody)
            self._nobody = None
        if not self._suspended:
            self._drain_queue()

    # Callbacks of the fleet.

    def worker_joined(self, worker: WorkerId, spec: WorkerSpec, info: WorkerInfo) -> None:
        if not isinstance(info, EngineInfo):
            raise InvariantBroken(f"{worker} is an engine and described itself as {type(info).__name__}")
        now = self._context.now()
        self._engines[worker] = _Engine(worker, spec, info, now, lambda _: self._silent(worker))
        self._router.engine_joined(worker, spec.hardware, info.slots)
        if self._affinity is not None:
            self._affinity.engine_joined(spec.hardware, info.slots)
        self._context.accounts.capacity(spec.pool, +1, now, engines=True)

    def worker_leaves(self, worker: WorkerId) -> None:
        engine = self._engines[worker]
        self._forget(engine)
        engine.leaves = True
        if not engine.in_flight:
            self._fleet.finished(worker)

    def worker_left(self, worker: WorkerId, spec: WorkerSpec, reason: str) -> None:
        engine = self._engines.get(worker)
        if engine is None:
            return
        lost = [session for session in self._turns.values() if session.engine is engine]
        for session in lost:
            self._detach(session)
        for session in engine.aborting.values():
            self._record_aborted(session, worker)
        del self._engines[worker]
        self._context.waits.close(engine.wait)
        self._forget(engine)
        self._context.accounts.capacity(spec.pool, -1, self._context.now(), engines=True)
        self._queue.extend(lost)
        if not self._engines and self._nobody is None:
            self._wait_for_an_engine(worker, reason)
        if not self._suspended:
            self._drain_queue()

    def _forget(self, engine: _Engine) -> None:
        """The engine gets no new turns."""
        self._router.engine_left(engine.worker)
        if self._affinity is not None and not engine.leaves:
            self._affinity.engine_left(engine.hardware)

    def _wait_for_an_engine(self, last: WorkerId, reason: str) -> None:
        deadline_s = self._context.config.deadlines.no_engine_s

        def expired(_: Wait) -> None:
            self._context.nursery.fail(
                NoEngine(
                    f"no engine for {deadline_s:g} s; the last one, {last}, was lost: {reason}. Fix it and resume."
                )
            )

        self._nobody = self._context.waits.guard("engines", "any engine", deadline_s, "the run stops", expired)

    # Sending.

    def _drain_queue(self) -> None:
        waiting, self._queue = self._queue, deque()
        for session in waiting:
            if self._sessions.get(session.trajectory.id) is session and not self._send(session):
                self._queue.append(session)

    def _send(self, session: _Session) -> bool:
        """Send the turn to the selected engine; False if none can take it now."""
        trajectory = session.trajectory
        begun = session.partial.tokens.length
        if begun and self._partial_is_whole(session):
            return True
        now = self._context.now()
        affinity = self._affinity if session.holder is None else None
        probe = None if affinity is None else affinity.probe(trajectory.task)
        placement = self._router.place(trajectory.id, trajectory.task, session.last_version, now, probe)
        if placement is None:
            return False
        if affinity is not None:
            affinity.placed(trajectory.task, probe, placement.reason)
        worker, holder = placement.decode, session.holder
        if holder != worker:
            self._context.record(Placed(now, trajectory.id, worker, placement.hardware, placement.reason))
            if holder is not None and holder in self._engines:
                self._fleet.post(holder, [EndSession(trajectory.id)])
            session.holder = worker
        self._add(session, worker, whole=holder != worker or begun > 0)
        return True

    def _partial_is_whole(self, session: _Session) -> bool:
        """Finish the turn if an engine was lost after its last token and before `TurnDone`."""
        tokens, sampling = session.partial.tokens, session.sampling
        stopped = tokens.payload is not None and int(tokens.ids()[-1]) in sampling.stop_tokens
        if not stopped and tokens.length < sampling.max_tokens:
            return False
        if session.holder is None:
            raise InvariantBroken(f"trajectory {session.trajectory.id} has tokens that no engine sampled")
        finish = FinishReason.STOP if stopped else FinishReason.LENGTH
        self._finish(session, TurnResult(session.partial, finish, session.holder, 0, 0, 0))
        return True

    def _add(self, session: _Session, worker: WorkerId, *, whole: bool) -> None:
        engine = self._engines[worker]
        trajectory, sampling = session.trajectory, session.sampling
        sequence = trajectory.sequence
        prefix_length = 0 if whole else sequence.turn_length
        new = sequence.since_turn() if prefix_length else sequence.whole()
        done = session.partial.tokens.length
        if done:
            new = concatenate([new, session.partial.tokens])
            sampling = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - done)
        request = RequestId(self._next_request)
        self._next_request += 1
        session.request, session.engine = request, engine
        if not engine.in_flight:
            self._context.accounts.engine_busy(engine.pool, +1, self._context.now())
        if not engine.owes:
            engine.heard_at = self._context.now()
            self._listen_for(engine, self._context.config.deadlines.engine_silent_s)
        engine.in_flight += 1
        self._turns[request] = session
        self._router.request_started(worker)
        digest = sequence.turn_digest if prefix_length else b""
        self._fleet.post(worker, [Add(request, trajectory.id, trajectory.task, prefix_length, digest, new, sampling)])

    def _detach(self, session: _Session) -> None:
        """The request is no longer at its engine; the turn may be over or go on elsewhere."""
        engine, session.engine = session.engine, None
        if engine is None:
            return
        del self._turns[session.request]
        engine.in_flight -= 1
        self._router.request_ended(engine.worker)
        if not engine.in_flight:
            self._context.accounts.engine_busy(engine.pool, -1, self._context.now())
            if not engine.aborting:
                self._context.waits.close(engine.wait)
            if engine.leaves:
                # Not at once: the caller may send the turn to it again.
                self._context.call_at(self._context.now(), self._finish_leaving, engine)

    def _finish_leaving(self, engine: _Engine) -> None:
        if not engine.in_flight:
            self._fleet.finished(engine.worker)

    def _finish(self, session: _Session, result: TurnResult | EngineFault) -> None:
        """End the turn. Its episode may have been stopped, or hit its deadline, meanwhile."""
        future, session.future = session.future, None
        session.partial = NOTHING
        if future is None or future.done():
            return
        if isinstance(result, TurnResult):
            future.set_result(result)
        else:
            future.set_exception(result)

    # Events of engines.

    def _find(self, worker: WorkerId, request: RequestId) -> _Session | None:
        """The session that an event belongs to; None for aborted and duplicate ones."""
        engine = self._engines.get(worker)
        if engine is None:
            return None
        engine.heard_at = self._context.now()
        session = self._turns.get(request)
        return session if session is not None and session.engine is engine else None

    def _progress(self, worker: WorkerId, event: Progress) -> None:
        engine = self._engines[worker]
        engine.heard_at = self._context.now()
        self._context.accounts.engine_stepped(engine.pool, event.stepping_s, event.recompute_s)
        if self._affinity is not None and event.work:
            self._affinity.worked(engine.hardware, event.work)
        for request, generated in event.parts:
            session = self._find(worker, request)
            if session is not None:
                self._extend(session, generated)
            elif (aborted := engine.aborting.get(request)) is not None:
                aborted.partial = aborted.partial.then(generated)

    def _extend(self, session: _Session, generated: Generated) -> None:
        first = session.trajectory.first_version is None and not session.partial.runs and generated.runs
        session.partial = session.partial.then(generated)
        if first:
            session.observer.first_token(session.trajectory, generated.runs[0].version)

    def _record_aborted(self, session: _Session, worker: WorkerId) -> None:
        sampled = session.partial.tokens.length
        self._context.record(TurnAborted(self._context.now(), session.trajectory.id, worker, sampled))

    def _aborted(self, worker: WorkerId, request: RequestId, generated: Generated = NOTHING) -> None:
        """Handle the answer to an aborted request; any other is ignored."""
        engine = self._engines[worker]
        session = engine.aborting.pop(request, None)
        if session is None:
            return
        session.partial = session.partial.then(generated)
        self._record_aborted(session, worker)
        if not engine.owes:
            self._context.waits.close(engine.wait)

    def _turn_done(self, worker: WorkerId, event: TurnDone) -> None:
        session = self._find(worker, event.request)
        if session is None:
            self._aborted(worker, event.request, event.generated)
            return
        self._extend(session, event.generated)
        usage = event.usage
        self._detach(session)
        self._finish(
            session,
            TurnResult(session.partial, event.finish, worker, usage.prefilled, usage.cached, usage.recomputed),
        )

    def _prefix_miss(self, worker: WorkerId, event: PrefixMiss) -> None:
        session = self._find(worker, event.request)
        if session is None:
            self._aborted(worker, event.request)
            return
        self._detach(session)
        self._add(session, worker, whole=True)

    def _refused(self, worker: WorkerId, event: Refused) -> None:
        session = self._find(worker, event.request)
        if session is None:
            self._aborted(worker, event.request)
            return
        self._detach(session)
        self._finish(session, EngineFault(f"{worker} refused a turn: {event.reason}"))

    # Silence.

    def _listen_for(self, engine: _Engine, seconds: float) -> None:
        """Watch for an engine that owes answers and reports nothing.

        The wait is open exactly while the engine owes any, and is renewed when it expires, not at every event.
        """
        self._context.waits.open(engine.wait, engine.worker, "progress", seconds, "it is replaced")

    def _silent(self, worker: WorkerId) -> None:
        engine = self._engines[worker]
        limit_s = self._context.config.deadlines.engine_silent_s
        now, due = self._context.now(), engine.heard_at + limit_s
        # Compare times, not spans: at the deadline a span may be an ulp short of the limit, forever.
        if now >= due and not self._suspended:
            silent_s = now - engine.heard_at
            self._fleet.replace(worker, f"silent for {silent_s:g} s with {engine.owes} requests in flight")
        else:
            self._listen_for(engine, limit_s if self._suspended else due - now)
