"""LLMProxy: the gateway between agents and engines.

Turns come in per trajectory and go to an engine that the router names. Only what is new travels. A turn whose engine is
lost goes on at another one, from the last token that was reported; a turn that nobody can take waits here until
somebody can, or its deadline passes. Every turn ends exactly once: its future gets a result or a fault.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

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


class TurnResult(NamedTuple):
    """A finished turn: what was sampled, where, and at what cost in tokens."""

    generated: Generated
    finish: FinishReason
    engine: WorkerId
    prefilled: int
    cached: int
    recomputed: int


class _Turn:
    """A turn in progress. `partial` is what engines have reported of it so far."""

    __slots__ = ("engine", "future", "partial", "request", "sampling", "trajectory")

    def __init__(self, trajectory: Trajectory, sampling: Sampling, future: "asyncio.Future[TurnResult]") -> None:
        self.trajectory = trajectory
        self.sampling = sampling
        self.future = future
        self.partial = NOTHING
        self.request: RequestId | None = None
        self.engine: WorkerId | None = None

    @property
    def last_version(self) -> Version | None:
        return self.partial.runs[-1].version if self.partial.runs else self.trajectory.last_version


class _Engine:
    """An engine as the proxy sees it."""

    __slots__ = ("aborting", "heard_at", "info", "pool", "turns", "wait")

    def __init__(self, pool: str, info: EngineInfo, now: float, silent: Callable[[Wait], None]) -> None:
        self.pool = pool
        self.info = info
        self.turns: dict[RequestId, _Turn] = {}
        self.aborting: dict[RequestId, _Turn] = {}
        """Stopped, and the engine has not yet said how far they came."""
        self.heard_at = now
        self.wait = Wait(silent)
        """For a sign of life; open while it has requests."""


class LLMProxy:
    """Route, suspend, resume; see the module."""

    def __init__(self, context: Context, fleet: Fleet, router: Router) -> None:
        self._context = context
        self._fleet = fleet
        self._router = router
        self._engines: dict[WorkerId, _Engine] = {}
        self._turns: dict[TrajectoryId, _Turn] = {}
        self._queue: deque[_Turn] = deque()
        self._sessions: dict[TrajectoryId, WorkerId] = {}
        """The engine that holds a trajectory's prefix up to its last sampled token."""
        self._next_request = 0
        self._suspended = False
        self._nobody: Wait | None = None
        self.first_token: Callable[[Trajectory, Version], None] = lambda _trajectory, _version: None
        """Told when the first token of a trajectory is known."""
        fleet.attach(Role.ENGINE, self)
        fleet.on(TurnDone, self._turn_done)
        fleet.on(PrefixMiss, self._prefix_miss)
        fleet.on(Refused, self._refused)
        fleet.on(Progress, self._progress)

    # What agents ask for.

    def generate(self, trajectory: Trajectory, sampling: Sampling) -> "asyncio.Future[TurnResult]":
        """The trajectory's next turn, after everything in its current sequence."""
        if trajectory.id in self._turns:
            raise InvariantBroken(f"trajectory {trajectory.id} asked for a turn while it has one")
        turn = _Turn(trajectory, sampling, self._context.loop.create_future())
        self._turns[trajectory.id] = turn
        if self._suspended or not self._send(turn):
            self._queue.append(turn)
        return turn.future

    def generating(self, trajectory: Trajectory) -> bool:
        """Whether the trajectory has a turn at an engine or waiting for one."""
        return trajectory.id in self._turns

    def end(self, trajectory: Trajectory) -> None:
        """The trajectory is over: abort its turn, if it has one, and free its session. Asking twice is fine."""
        turn = self._turns.pop(trajectory.id, None)
        if turn is not None and turn.engine is not None and turn.request is not None:
            self._fleet.post(turn.engine, [Abort(turn.request)])
            self._engines[turn.engine].aborting[turn.request] = turn
            self._detach(turn)
        engine = self._sessions.pop(trajectory.id, None)
        if engine is not None and engine in self._engines:
            self._fleet.post(engine, [EndSession(trajectory.id)])
        self._router.trajectory_ended(trajectory.id)

    # What weight sync asks for.

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
        self._router.engine_serves(worker, version)
        if self._nobody is not None:
            self._context.waits.close(self._nobody)
            self._nobody = None
        if not self._suspended:
            self._drain_queue()

    # What the fleet tells.

    def worker_joined(self, worker: WorkerId, spec: WorkerSpec, info: WorkerInfo) -> None:
        if not isinstance(info, EngineInfo):
            raise InvariantBroken(f"{worker} is an engine and described itself as {type(info).__name__}")
        now = self._context.now()
        self._engines[worker] = _Engine(spec.pool, info, now, lambda _: self._silent(worker))
        self._router.engine_joined(worker, spec.hardware, info.slots)
        self._context.accounts.capacity(spec.pool, +1, now, engines=True)

    def worker_left(self, worker: WorkerId, spec: WorkerSpec, reason: str) -> None:
        engine = self._engines.get(worker)
        if engine is None:
            return
        lost = list(engine.turns.values())
        for turn in lost:
            self._detach(turn)
        for turn in engine.aborting.values():
            self._record_aborted(turn, worker)
        del self._engines[worker]
        self._context.waits.close(engine.wait)
        self._router.engine_left(worker)
        self._context.accounts.capacity(spec.pool, -1, self._context.now(), engines=True)
        self._queue.extend(lost)
        if not self._engines and self._nobody is None:
            self._wait_for_an_engine(worker, reason)
        if not self._suspended:
            self._drain_queue()

    def _wait_for_an_engine(self, last: WorkerId, reason: str) -> None:
        deadline_s = self._context.config.deadlines.engine_joins_s

        def expired(_: Wait) -> None:
            self._context.nursery.fail(
                NoEngine(
                    f"no engine for {deadline_s:g} s; the last one, {last}, was lost: {reason}. Mend it and resume."
                )
            )

        self._nobody = self._context.waits.guard("engines", "any engine", deadline_s, "the run stops", expired)

    # Sending.

    def _drain_queue(self) -> None:
        waiting, self._queue = self._queue, deque()
        for turn in waiting:
            if self._turns.get(turn.trajectory.id) is turn and not self._send(turn):
                self._queue.append(turn)

    def _send(self, turn: _Turn) -> bool:
        """Send the turn where the router says; False when nobody can take it now."""
        trajectory = turn.trajectory
        if turn.partial.tokens.length and self._partial_is_whole(turn):
            return True
        placement = self._router.place(trajectory.id, trajectory.task, turn.last_version, self._context.now())
        if placement is None:
            return False
        worker = placement.decode
        holder = self._sessions.get(trajectory.id)
        if holder != worker:
            self._context.record(
                Placed(self._context.now(), trajectory.id, worker, placement.hardware, placement.reason)
            )
            if holder is not None and holder in self._engines:
                self._fleet.post(holder, [EndSession(trajectory.id)])
            self._sessions[trajectory.id] = worker
        self._add(turn, worker, whole=holder != worker or bool(turn.partial.tokens.length))
        return True

    def _partial_is_whole(self, turn: _Turn) -> bool:
        """Whether an engine was lost after it sampled the last token and before it said so; then the turn is over."""
        tokens = turn.partial.tokens
        stopped = tokens.payload is not None and int(tokens.ids()[-1]) in turn.sampling.stop_tokens
        if not stopped and tokens.length < turn.sampling.max_tokens:
            return False
        del self._turns[turn.trajectory.id]
        if not turn.future.done():
            finish = FinishReason.STOP if stopped else FinishReason.LENGTH
            engine = self._sessions[turn.trajectory.id]
            turn.future.set_result(TurnResult(turn.partial, finish, engine, 0, 0, 0))
        return True

    def _add(self, turn: _Turn, worker: WorkerId, *, whole: bool) -> None:
        engine = self._engines[worker]
        sequence = turn.trajectory.sequence
        prefix_length = 0 if whole else sequence.turn_length
        new = sequence.since_turn() if prefix_length else sequence.whole()
        sampling = turn.sampling
        done = turn.partial.tokens.length
        if done:
            new = concatenate([new, turn.partial.tokens])
            sampling = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - done)
        request = RequestId(self._next_request)
        self._next_request += 1
        turn.request, turn.engine = request, worker
        if not engine.turns:
            self._context.accounts.engine_busy(engine.pool, +1, self._context.now())
            engine.heard_at = self._context.now()
            self._listen_for(worker, engine, self._context.config.deadlines.engine_silent_s)
        engine.turns[request] = turn
        self._router.request_started(worker)
        digest = sequence.turn_digest if prefix_length else b""
        self._fleet.post(
            worker, [Add(request, turn.trajectory.id, turn.trajectory.task, prefix_length, digest, new, sampling)]
        )

    def _detach(self, turn: _Turn) -> None:
        """The request is no longer at its engine; the turn may be over or go on elsewhere."""
        worker, request = turn.engine, turn.request
        if worker is None or request is None:
            return
        engine = self._engines[worker]
        del engine.turns[request]
        self._router.request_ended(worker)
        if not engine.turns:
            self._context.accounts.engine_busy(engine.pool, -1, self._context.now())
            self._context.waits.close(engine.wait)
        turn.engine = turn.request = None

    # What engines say.

    def _find(self, worker: WorkerId, request: RequestId) -> _Turn | None:
        """The turn that an event is about; None for an aborted or doubled one."""
        engine = self._engines.get(worker)
        if engine is None:
            return None
        engine.heard_at = self._context.now()
        return engine.turns.get(request)

    def _progress(self, worker: WorkerId, event: Progress) -> None:
        self._engines[worker].heard_at = self._context.now()
        for request, generated in event.parts:
            turn = self._find(worker, request)
            if turn is not None:
                self._extend(turn, generated)
            elif (aborted := self._engines[worker].aborting.get(request)) is not None:
                aborted.partial = aborted.partial.then(generated)

    def _extend(self, turn: _Turn, generated: Generated) -> None:
        first = turn.trajectory.first_version is None and not turn.partial.runs and generated.runs
        turn.partial = turn.partial.then(generated)
        if first:
            self.first_token(turn.trajectory, generated.runs[0].version)

    def _record_aborted(self, turn: _Turn, worker: WorkerId) -> None:
        sampled = turn.partial.tokens.length
        self._context.record(TurnAborted(self._context.now(), turn.trajectory.id, worker, sampled))

    def _turn_done(self, worker: WorkerId, event: TurnDone) -> None:
        turn = self._find(worker, event.request)
        if turn is None:
            aborted = self._engines[worker].aborting.pop(event.request, None)
            if aborted is not None:
                aborted.partial = aborted.partial.then(event.generated)
                self._record_aborted(aborted, worker)
            return
        self._extend(turn, event.generated)
        usage = event.usage
        self._detach(turn)
        del self._turns[turn.trajectory.id]
        if not turn.future.done():
            turn.future.set_result(
                TurnResult(turn.partial, event.finish, worker, usage.prefilled, usage.cached, usage.recomputed)
            )

    def _prefix_miss(self, worker: WorkerId, event: PrefixMiss) -> None:
        turn = self._find(worker, event.request)
        if turn is None:
            return
        self._detach(turn)
        self._add(turn, worker, whole=True)

    def _refused(self, worker: WorkerId, event: Refused) -> None:
        turn = self._find(worker, event.request)
        if turn is None:
            return
        self._detach(turn)
        del self._turns[turn.trajectory.id]
        if not turn.future.done():
            turn.future.set_exception(EngineFault(f"{worker} refused a turn: {event.reason}"))

    # Silence.

    def _listen_for(self, worker: WorkerId, engine: _Engine, seconds: float) -> None:
        """Notice an engine that has requests and says nothing. The wait is renewed when it expires, not at every event.

        It is open exactly while the engine has requests.
        """
        self._context.waits.open(engine.wait, str(worker), "progress", seconds, "it is replaced")

    def _silent(self, worker: WorkerId) -> None:
        engine = self._engines[worker]
        limit_s = self._context.config.deadlines.engine_silent_s
        now, due = self._context.now(), engine.heard_at + limit_s
        # Times are compared, not spans: at its deadline a span may come out an ulp short of the limit, for ever.
        if now >= due and not self._suspended:
            silent_s = now - engine.heard_at
            self._fleet.replace(worker, f"silent for {silent_s:g} s with {len(engine.turns)} requests in flight")
        else:
            self._listen_for(worker, engine, limit_s if self._suspended else due - now)
