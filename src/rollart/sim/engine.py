"""Simulated inference engine: the command loop of a real one over modelled hardware.

Every accepted request ends in exactly one `TurnDone` (or in a late `PrefixMiss`, if its prefix was evicted while it was
queued). Each token is reported once, in `Progress` or `TurnDone`, with the version in service when its step ended.
`batching` computes when requests end, `kvcache` what KV is held and which requests fit; this module implements the
protocol and tracks versions.

The tokens a turn computed are `prefilled + recomputed` of its `usage`. Reports say what the work of each task took
(`TaskWork`): of running requests, what they have decoded, and their prefill once it is done.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollart.config.injection import Slowdown
from rollart.ports.weights import WeightStore
from rollart.ports.worker import Advance
from rollart.sim.batching import NO_TOKENS, Batch, Request
from rollart.sim.draws import mix, uniform
from rollart.sim.hardware import Roofline, shared_roofline
from rollart.sim.kvcache import KvCache
from rollart.sim.workload import shared_workloads
from rollart.types.errors import InvariantBroken, WeightError
from rollart.types.ids import RequestId
from rollart.types.messages import (
    Abort,
    Add,
    EndSession,
    EngineInfo,
    FinishReason,
    KvOnUpdate,
    PrefixMiss,
    Progress,
    Refused,
    Resume,
    Stage,
    Staged,
    StageFailed,
    Suspend,
    TaskWork,
    TurnDone,
    TurnUsage,
    Update,
    Updated,
    WorkerCommand,
    WorkerEvent,
)
from rollart.types.versions import Version
from rollart.types.weights import Manifest, verify_bucket

_PREFIX = 0x7072656669780000
"""Stream of prefix-cache hits, separate from those of the workload."""


class _Work:
    """Work for one task since the last report."""

    __slots__ = ("decode_s", "decode_steps", "decode_tokens", "prefill_s", "prefill_tokens", "turns")

    def __init__(self) -> None:
        self.turns = self.prefill_tokens = self.decode_tokens = 0
        self.prefill_s = self.decode_s = self.decode_steps = 0.0

    def taken(self, task: str) -> TaskWork:
        return TaskWork(
            task,
            self.turns,
            self.prefill_tokens,
            self.prefill_s,
            self.decode_tokens,
            self.decode_s,
            self.decode_steps,
        )


class SimEngine:
    """One replica. Settings:

    hardware: Hardware       model: ModelProfile     ranks: int               seed: int
    tasks: Mapping[str, TaskProfile]                 answer lengths per task; requests of other tasks are refused
    store: WeightStore       pull_gb_s: float        source of versions, and transfer rate
    slots: int               max_context: int        bounded by the KV memory; requests beyond the slots wait
    kv_on_update: KvOnUpdate | str                   `recompute` (the default) or `keep`
    progress_interval_s: float                       5 by default
    prefix_hit: float                                share of turns that find their session's prefix; 1 by default
    inject: Slowdowns                                slows the hardware, from the first call on; none by default
    measure: bool                                    report work by task; False by default
    """

    __slots__ = (
        "_batch",
        "_cache",
        "_commands",
        "_max_context",
        "_measure",
        "_newest",
        "_now",
        "_prefix_hit",
        "_prefix_key",
        "_progress_at",
        "_progress_interval_s",
        "_pull_gb_s",
        "_queue",
        "_recompute",
        "_reported_clock",
        "_slots",
        "_slowdowns",
        "_speed_at",
        "_staged",
        "_staging",
        "_store",
        "_suspended",
        "_version",
        "_work",
        "_work_at",
        "_workloads",
    )

    def __init__(self, settings: Mapping[str, Any], _wake: Callable[[], None]) -> None:
        roofline = shared_roofline(settings["hardware"], settings["model"], settings["ranks"])
        seed: int = settings["seed"]
        self._workloads = shared_workloads(settings["tasks"], seed)
        self._cache = KvCache(roofline.kv_capacity_tokens)
        self._batch = Batch(roofline)
        self._slots: int = settings["slots"]
        self._max_context = min(int(settings["max_context"]), self._cache.capacity_tokens)
        self._recompute = KvOnUpdate(settings.get("kv_on_update", KvOnUpdate.RECOMPUTE)) is KvOnUpdate.RECOMPUTE
        self._progress_interval_s: float = settings.get("progress_interval_s", 5.0)
        self._prefix_hit: float = settings.get("prefix_hit", 1.0)
        self._prefix_key = mix(seed, _PREFIX)
        self._store: WeightStore = settings["store"]
        self._pull_gb_s: float = settings["pull_gb_s"]

        slowdowns = sorted(settings.get("inject", ()), key=lambda slowdown: slowdown.from_s)
        self._slowdowns: deque[tuple[float, Slowdown]] = deque((each.from_s, each) for each in slowdowns)
        """With their times; those are relative to the first call until it comes."""
        self._speed_at = -math.inf if slowdowns else math.inf
        """When the engine changes its speed next; -inf until the first call."""

        self._now = 0.0
        self._measure: bool = settings.get("measure", False)
        self._work: dict[str, _Work] = {}
        self._work_at = 0.0
        """When it was reported last."""
        self._commands: list[WorkerCommand] = []
        self._suspended = False
        self._progress_at = math.inf
        self._reported_clock = 0

        self._queue: list[Request] = []
        """Accepted, not yet in the batch; usually empty."""
        self._newest = -1
        """Newest accepted request id."""

        self._version: Version | None = None
        self._staged: set[Version] = set()
        self._staging: deque[tuple[float, Manifest]] = deque()

    # --- the Worker port --------------------------------------------------------------------------------------------

    def info(self) -> EngineInfo:
        return EngineInfo(
            slots=self._slots,
            max_context=self._max_context,
            kv_on_update=KvOnUpdate.RECOMPUTE if self._recompute else KvOnUpdate.KEEP,
            progress_interval_s=self._progress_interval_s,
        )

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:
        if now < self._now:
            raise InvariantBroken(f"the engine was driven at {now} after {self._now}: time went backwards")
        self._now = now
        events: list[WorkerEvent] = []
        batch = self._batch
        if self._speed_at == -math.inf:
            self._slowdowns = deque((now + after_s, slowdown) for after_s, slowdown in self._slowdowns)
            self._speed_at = self._slowdowns[0][0]
        # In order of time, even if the call comes late: what is due may change what follows.
        while (due := self._next_due()) <= now:
            if due == batch.end:
                self._complete(events)
            elif due == self._speed_at:
                self._change_speed(due)
            elif self._staging and due == self._staging[0][0]:
                self._stage_ended(events)
            else:
                self._report(due, events)
        if self._commands:
            commands, self._commands = self._commands, []
            batch.settle(now)
            for command in commands:
                self._obey(command, now, events)
            if not self._suspended:
                self._admit(events)
            batch.plan()
            self._arm_progress(now)
            due = self._next_due()
        return Advance(events, None if due == math.inf else due)

    def close(self) -> None:
        self._commands.clear()

    def _next_due(self) -> float:
        """Time of the next internal event: a request ends, a version has arrived, a report is due."""
        due = self._batch.end
        if self._progress_at < due:
            due = self._progress_at
        if self._speed_at < due:
            due = self._speed_at
        if self._staging and self._staging[0][0] < due:
            due = self._staging[0][0]
        return due

    # --- for tests --------------------------------------------------------------------------------------------------

    @property
    def kv_tokens(self) -> int:
        """KV memory in use: reserved by running requests, and cached."""
        return self._cache.reserved_tokens + self._cache.idle_tokens

    @property
    def kv_capacity_tokens(self) -> int:
        return self._cache.capacity_tokens

    # --- commands ---------------------------------------------------------------------------------------------------

    def _obey(self, command: WorkerCommand, now: float, events: list[WorkerEvent]) -> None:
        kind = type(command)
        if kind is Add:
            self._add(command, events)  # type: ignore[arg-type]  # `isinstance` costs a fifth of an Add
        elif isinstance(command, Abort):
            self._abort(command.request, events)
        elif isinstance(command, EndSession):
            self._cache.end(command.session)
        elif isinstance(command, Suspend):
            self._suspended = True
            self._batch.running = False
        elif isinstance(command, Resume):
            self._suspended = False
            self._batch.running = True
        elif isinstance(command, Stage):
            self._stage(command.manifest, now, events)
        elif isinstance(command, Update):
            self._update(command.version, events)
        else:
            raise InvariantBroken(f"an engine does not accept {kind.__name__}")

    def _add(self, add: Add, events: list[WorkerEvent]) -> None:
        id = add.request
        if id <= self._newest:
            return  # a duplicate: ids only grow
        prefix = add.prefix_length
        context = prefix + add.new.length
        sampling = add.sampling
        workload = self._workloads.get(add.task)
        if self._version is None:
            events.append(Refused(id, "no weights yet: stage and commit a version first"))
        elif workload is None:
            events.append(Refused(id, f"the engine has no profile of task {add.task!r}"))
        elif context + 1 > self._max_context:
            events.append(Refused(id, f"{context} tokens leave no room in a context of {self._max_context}"))
        elif sampling.max_tokens < 1:
            events.append(Refused(id, f"max_tokens is {sampling.max_tokens}; it must be at least 1"))
        elif not sampling.is_plain:
            events.append(Refused(id, "top-p, top-k and stop strings: simulated tokens are drawn by length only"))
        elif prefix and (self._cache.find(add.session, prefix) is None or self._lost(add)):
            events.append(PrefixMiss(id))
        else:
            limit = min(sampling.max_tokens, self._max_context - context)
            length = workload.answer_tokens(sampling.seed)
            if length < limit:
                request = Request(add, context, length, FinishReason.STOP)
            else:
                request = Request(add, context, limit, FinishReason.LENGTH)
            self._newest = id
            self._queue.append(request)

    def _lost(self, add: Add) -> bool:
        """Whether the prefix was lost between two turns for reasons outside this model. Drawn per turn of an
        episode."""
        if self._prefix_hit >= 1.0 or uniform(self._prefix_key, add.sampling.seed) < self._prefix_hit:
            return False
        self._cache.end(add.session)
        return True

    def _abort(self, id: RequestId, events: list[WorkerEvent]) -> None:
        request = self._batch.find(id)
        if request is None:
            self._abort_queued(id, events)
            return
        self._batch.leave(request)
        sampled = request.sampled(self._batch.clock)
        session = request.session
        if session is not None:
            if request.work_left_s <= 0.0:
                self._cache.keep(session, request.need, request.context + sampled)
            elif request.recomputed:
                self._cache.keep(session, request.need, request.context + sampled, void=True)
            else:
                self._cache.lose(session, request.need)
        self._done(request, sampled, FinishReason.ABORTED, events)

    def _abort_queued(self, id: RequestId, events: list[WorkerEvent]) -> None:
        for request in self._queue:
            if request.id == id:
                self._queue.remove(request)
                # It never ran: nothing was computed or cached for it.
                events.append(TurnDone(id, NO_TOKENS, FinishReason.ABORTED, TurnUsage()))
                return

    # --- the batch --------------------------------------------------------------------------------------------------

    def _admit(self, events: list[WorkerEvent]) -> None:
        """Start queued requests, first in, first out, while there are free slots and KV memory."""
        queue, cache, batch = self._queue, self._cache, self._batch
        gone = 0
        for request in queue:
            if batch.size >= self._slots:
                break
            prefix = request.prefix
            session = cache.find(request.session_id, prefix) if prefix else None
            if prefix and session is None:
                # Evicted, ended or replaced while it was queued.
                gone += 1
                events.append(PrefixMiss(request.id))
                continue
            if not cache.reserve(request.need, session):
                break
            gone += 1
            held = prefix
            if session is None:
                session = cache.open(request.session_id)
            elif cache.is_void(session):
                request.recomputed = prefix
                held = 0
            else:
                request.cached = prefix
            request.session = session
            batch.join(request, held)
        del queue[:gone]

    def _complete(self, events: list[WorkerEvent]) -> None:
        """Handle the `end` of the batch: some requests end, others start."""
        now = self._batch.end
        for request in self._batch.complete():
            if request.session is not None:
                need = request.need
                self._cache.keep(request.session, need, need)
            self._done(request, request.length, request.finish, events)
        if self._measure and now >= self._work_at + self._progress_interval_s:
            # An engine that is often idle is rarely busy when a report is due.
            events.append(Progress((), 0, work=self._take_work(now)))
        if self._queue:
            self._admit(events)
        self._batch.plan()
        self._arm_progress(now)

    def _done(self, request: Request, sampled: int, finish: FinishReason, events: list[WorkerEvent]) -> None:
        if self._measure:
            self._account(request, sampled, ended=finish is not FinishReason.ABORTED)
        usage = TurnUsage(request.context - request.prefix, request.cached, request.recomputed)
        events.append(TurnDone(request.id, request.take(sampled, self._serving()), finish, usage))

    # --- progress ---------------------------------------------------------------------------------------------------

    def _arm_progress(self, now: float) -> None:
        """Reports run on their own timer while anything is in flight."""
        if self._suspended or not (self._batch.size or self._queue):
            self._progress_at = math.inf
        elif self._progress_at == math.inf:
            self._progress_at = now + self._progress_interval_s

    def _report(self, now: float, events: list[WorkerEvent]) -> None:
        clock = self._batch.clock_at(now)
        version = self._serving()
        requests = self._batch.requests()
        if self._measure:
            settled = self._batch.clock
            for request in requests:
                self._account(request, request.sampled(settled))
        parts = tuple(
            (request.id, request.take(sampled, version))
            for request in requests
            if (sampled := request.sampled(clock)) > request.reported
        )
        events.append(Progress(parts, clock - self._reported_clock, work=self._take_work(now)))
        self._reported_clock = clock
        self._progress_at = now + self._progress_interval_s

    def _take_work(self, now: float) -> tuple[TaskWork, ...]:
        work = tuple(done.taken(task) for task, done in self._work.items())
        self._work.clear()
        self._work_at = now
        return work

    def _account(self, request: Request, sampled: int, *, ended: bool = False) -> None:
        """Add what a request has cost since the last time to the work of its task."""
        work = self._work.get(request.task)
        if work is None:
            work = self._work[request.task] = _Work()
        batch = self._batch
        work.turns += ended
        work.decode_tokens += sampled - request.counted
        work.decode_s += batch.share_s - request.share_s
        work.decode_steps += batch.share_steps - request.share_steps
        request.counted, request.share_s, request.share_steps = sampled, batch.share_s, batch.share_steps
        if request.ended or request.work_left_s <= 0.0:
            if request.work_left_s > 0.0:
                request.drop_work()
            work.prefill_tokens += request.computed
            work.prefill_s += request.computed_s
            request.computed, request.computed_s = 0, 0.0

    def _change_speed(self, now: float) -> None:
        _, slowdown = self._slowdowns.popleft()
        self._speed_at = self._slowdowns[0][0] if self._slowdowns else math.inf
        self._batch.settle(now)
        self._batch.slow(slowdown.prefill, slowdown.decode)
        self._batch.plan()

    # --- versions ---------------------------------------------------------------------------------------------------

    def _serving(self) -> Version:
        if self._version is None:
            raise InvariantBroken("a token was sampled before any version was in service")
        return self._version

    def _stage(self, manifest: Manifest, now: float, events: list[WorkerEvent]) -> None:
        version = manifest.version
        if version == self._version or version in self._staged:
            events.append(Staged(version))
        elif self._version is not None and version < self._version:
            events.append(StageFailed(version, f"{self._version}, the version in service, is newer"))
        elif all(other.version != version for _, other in self._staging):
            begin = self._staging[-1][0] if self._staging else now
            pull_s = Roofline.transfer_s(manifest.total_bytes, self._pull_gb_s)
            self._staging.append((begin + pull_s, manifest))

    def _stage_ended(self, events: list[WorkerEvent]) -> None:
        _, manifest = self._staging.popleft()
        version = manifest.version
        try:
            if self._store.manifest(version).digests != manifest.digests:
                raise WeightError(f"the store's digests of {version} differ from the controller's; stage it again")
            for index in range(len(manifest.digests)):
                verify_bucket(manifest, index, self._store.bucket(version, index))
        except WeightError as error:
            events.append(StageFailed(version, str(error)))
            return
        self._staged.add(version)
        events.append(Staged(version))

    def _update(self, version: Version, events: list[WorkerEvent]) -> None:
        if version == self._version:
            events.append(Updated(version))
            return
        if version not in self._staged:
            events.append(StageFailed(version, f"{version} is not staged here; stage it before the update"))
            return
        # Never older: staging refuses older versions, and an update discards staged versions below it.
        if self._version is not None:
            for request in self._batch.requests():
                request.close_run(self._batch.clock, self._version)
            if self._recompute:
                self._batch.recompute()
                self._cache.void_all()
        self._version = version
        self._staged = {other for other in self._staged if other > version}
        events.append(Updated(version))
