"""Whether a journal keeps the rules of the design, judged from the journal alone.

Nothing that the control plane computed is believed: staleness, lags, shares, token counts and lineage are derived again
from the events below them and compared with what was written. The audit streams: it remembers what is in flight, plus
what was trained since the last checkpoint, so the journal of a month can be read. What it remembers is plain data: an
`Auditor` can be encoded in the middle of a journal and goes on, decoded, as if nothing had happened.

    rule 1  conservation   trajectories, groups, claims and prompts end once; only results are trained, each once
    rule 2  staleness      0 ≤ served − first ≤ α at the claim, for everything whose tokens are trained
    rule 3  shares         whole groups, in the configured numbers unless a redistribution was recorded
    rule 4  versions       published before served, only growing, every token of a version that its engine had
    rule 5  tokens         what the turns sampled is what the trajectory is said to hold
    rule 6  waits          a run that waits for nobody has stalled
    rule 8  liveness       from step to step, or from the start of a trainer, no longer than the bound that was stated
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from rollart.config.modes import MODES, Mode
from rollart.types import journal as j
from rollart.types.ids import ClaimId, GroupId, TrajectoryId, WorkerId
from rollart.types.messages import Role
from rollart.types.trajectory import TRAINABLE, GroupOutcome, Outcome, Purpose
from rollart.types.versions import Version


class Violation(NamedTuple):
    """A rule that does not hold: which, at which event (counted from 0), and how."""

    rule: int
    event: int
    what: str

    def __str__(self) -> str:
        return f"rule {self.rule}, event {self.event}: {self.what}"


class _Trajectory(msgspec.Struct, array_like=True):
    id: TrajectoryId
    group: GroupId
    turns: int = 0
    sampled: int = 0
    first: Version | None = None
    last: Version | None = None
    engine: WorkerId | None = None
    engines: list[WorkerId] = []
    """Where the tokens of the next turn can come from: the engine of the last turn, and all that it went to since."""
    since: Version | None = None
    """The oldest version that those engines had when it came to them: no token to come is older."""
    reward: float | None = None
    ended: bool = False


class _Group(msgspec.Struct, array_like=True):
    opened: j.GroupOpened
    members: list[TrajectoryId] = []
    results: list[TrajectoryId] = []
    """Members that ended with a result, in that order."""
    claim: ClaimId | None = None
    trained: int | None = None

    @property
    def id(self) -> GroupId:
        return self.opened.group


class _Engine(msgspec.Struct, array_like=True):
    joined: bool = False
    dead: bool = False
    version: Version | None = None
    had: list[Version] = []
    """Of the versions that it served, those that a token to come may still have."""


MAX_LISTED = 10_000
"""Violations that are kept in words: one that shows at every event does not make the audit grow with the journal."""

_FAILURES = frozenset({Outcome.ENV_FAILED, Outcome.ENGINE_FAILED, Outcome.REWARD_FAILED})


def audit(events: Iterable[j.JournalEvent]) -> list[Violation]:
    """Every violation, in the order in which it shows."""
    auditor = Auditor()
    for event in events:
        auditor.take(event)
    return auditor.finish()


class Auditor(msgspec.Struct, kw_only=True):
    """Takes a journal event by event. Everything it knows is a field, and is carried when a journal is pruned."""

    violations: list[Violation] = []
    """The first `MAX_LISTED`."""
    unlisted: int = 0
    """How many more there were."""
    count: int = 0
    """Events so far."""
    _run: j.RunStarted | None = None
    _ended: j.RunEnded | None = None
    _groups: dict[GroupId, _Group] = {}
    _next_group: int = 0
    _trajectories: dict[TrajectoryId, _Trajectory] = {}
    """Those without an outcome, and all members of open groups."""
    _next_trajectory: int = 0
    _claims: dict[ClaimId, j.BatchClaimed] = {}
    _engines: dict[WorkerId, _Engine] = {}
    """Those that live, and dead ones whose tokens may still be reported."""
    _published: list[Version] = []
    """Since the last sync, and the version of the run."""
    _newest: Version | None = None
    _served: Version | None = None
    """The newest version that an engine had in service."""
    _synced: Version | None = None
    """The version of the run: of the last sync, or the first in service."""
    _syncing: Version | None = None
    """The version that engines began to take in a sync that has not ended."""
    _epoch: int = -1
    _step: int = 0
    _saved: int = 0
    """The step of the last checkpoint."""
    _tickets: dict[int, str] = {}
    """Every ticket that is not settled: waiting, open, or trained."""
    _next_ticket: int = 0
    _tasks: dict[int, str] = {}
    _waiting: dict[str, int] = {}
    _making: dict[str, int] = {}
    """Training groups that are open or ready, by task."""
    _trained: dict[GroupId, tuple[int, int]] = {}
    """Trained since the last checkpoint: step and ticket."""
    _redistributed: dict[int, list[j.ShareRedistributed]] = {}
    _roles: dict[WorkerId, tuple[Role, str]] = {}
    """The last incarnation of every place."""
    _incarnations: dict[str, int] = {}
    _step_bound_s: float = math.inf
    _stepping_since: float = 0.0
    """The last step, or the last time that a trainer started or was lost."""
    slowest_step_s: float = 0.0
    _at: float = -math.inf

    def take(self, event: j.JournalEvent) -> None:
        if self._run is None and not isinstance(event, j.RunStarted):
            self._wrong(1, "the journal does not begin with RunStarted")
            self._run = j.RunStarted(event.at, "", Mode.ROLLART.value, 0, 0, {}, 0)
        if self._ended is not None and not isinstance(event, j.RunResumed):
            self._wrong(1, f"{type(event).__name__} after the end of the run")
        if event.at < self._at and not isinstance(event, j.RunResumed):
            self._wrong(1, f"{type(event).__name__} at {event.at} s after an event at {self._at} s")
        self._at = event.at
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)
        self.count += 1

    def finish(self) -> list[Violation]:
        """The end of the journal: a run that ended has nothing open."""
        if self._ended is None:
            return self.violations
        for trajectory in self._trajectories.values():
            if not trajectory.ended:
                self._wrong(1, f"trajectory {trajectory.id} has no outcome")
        for group in self._groups.values():
            self._wrong(1, f"group {group.id} has no end")
        for claim in self._claims:
            self._wrong(1, f"claim {claim} neither ended in a step nor was returned")
        for ticket, state in self._tickets.items():
            if state == "open":
                self._wrong(1, f"ticket {ticket} is neither trained, nor spent, nor waiting")
        if self._ended.steps != self._step:
            self._wrong(1, f"the run says {self._ended.steps} steps; the lineage has {self._step}")
        if self._syncing is not None and not self._ended.reason:
            self._wrong(4, f"the sync to {self._syncing} did not end")
        return self.violations

    def _wrong(self, rule: int, what: str) -> None:
        if len(self.violations) < MAX_LISTED:
            self.violations.append(Violation(rule, self.count, what))
        else:
            self.unlisted += 1

    # --- the run ----------------------------------------------------------------------------------------------------

    def _run_started(self, event: j.RunStarted) -> None:
        if self._run is not None:
            self._wrong(1, "the run started twice")
        self._run = event
        self._step_bound_s = event.step_bound_s
        self._stepping_since = event.at

    def _run_resumed(self, event: j.RunResumed) -> None:
        """Everything that lived in the old controller is gone, but what it owed is still owed."""
        self._ended = None
        for engine in self._engines.values():
            engine.dead = True
        self._roles.clear()
        self._incarnations.clear()
        self._served = self._synced = self._syncing = None
        self._redistributed.clear()  # of a batch that was never claimed
        self._step_bound_s = event.step_bound_s
        self._stepping_since = event.at

    def _run_ended(self, event: j.RunEnded) -> None:
        self._ended = event
        if event.reason:
            self._check_liveness("run to stop", event.at)
        if event.reason.startswith("StalledRun"):
            self._wrong(6, event.reason)
        if event.reason.startswith("InvariantBroken") or event.reason.startswith("NegativeStaleness"):
            self._wrong(1, event.reason)

    def _stall_reported(self, event: j.StallReported) -> None:
        if not event.waits:
            self._wrong(6, "nothing moved and nothing was waited for")

    def _epoch_started(self, event: j.EpochStarted) -> None:
        if event.epoch <= self._epoch:
            self._wrong(4, f"epoch {event.epoch} was started after {self._epoch}")
        self._epoch = event.epoch
        # A checkpoint that was saved before anybody heard of it is legal; one that is lost, or of the future, is not.
        if not self._saved <= event.step <= self._step:
            self._wrong(
                1,
                f"a trainer started from step {event.step}; the last checkpoint is of {self._saved}, "
                f"the lineage is at {self._step}",
            )
        self._check_liveness("start of a trainer", event.at)

    def _check_liveness(self, what: str, at: float) -> None:
        """The clock runs from step to step; a trainer that starts or is lost sets it anew."""
        took_s, self._stepping_since = at - self._stepping_since, at
        self.slowest_step_s = max(self.slowest_step_s, took_s)
        if took_s > self._step_bound_s:
            self._wrong(8, f"{took_s:g} s for a {what}, the run's bound is {self._step_bound_s:g} s")

    # --- workers and versions ---------------------------------------------------------------------------------------

    def _worker_spawned(self, event: j.WorkerSpawned) -> None:
        place, _, number = event.worker.rpartition(".")
        incarnation = int(number) if number.isdecimal() else 0
        before = self._incarnations.get(place, -1)
        if incarnation <= before:
            self._wrong(1, f"worker {event.worker} was started twice under one id")
        self._roles.pop(WorkerId(f"{place}.{before}"), None)
        self._incarnations[place] = max(incarnation, before)
        self._roles[event.worker] = (event.role, event.pool)
        if event.role is Role.ENGINE:
            self._engines[event.worker] = _Engine()

    def _worker_joined(self, event: j.WorkerJoined) -> None:
        engine = self._engines.get(event.worker)
        if engine is not None:
            engine.joined = True

    def _worker_died(self, event: j.WorkerDied) -> None:
        engine = self._engines.get(event.worker)
        if engine is not None:
            engine.dead = True
        if self._roles.get(event.worker, (None, ""))[0] is Role.TRAINER:
            self._check_liveness("trainer to be given up", event.at)
        if not event.action:
            self._wrong(6, f"{event.worker} died and nothing was done about it")

    def _version_published(self, event: j.VersionPublished) -> None:
        version = event.version
        if self._newest is not None and version <= self._newest:
            self._wrong(4, f"{version} was published after {self._newest}")
        if version.epoch != self._epoch:
            self._wrong(4, f"{version} was published in epoch {self._epoch}, which is not durable under that number")
        self._published.append(version)
        self._newest = version

    def _engine_updated(self, event: j.EngineUpdated) -> None:
        engine = self._live_engine(event.worker, f"updated to {event.version}")
        if event.version not in self._published:
            self._wrong(
                4, f"{event.worker} serves {event.version}, which was never published, or is older than {self._synced}"
            )
        self._engine_takes(event.version)
        if engine is None:
            return
        if engine.version is not None and event.version < engine.version:
            self._wrong(4, f"{event.worker} went back from {engine.version} to {event.version}")
        engine.version = event.version
        if event.version not in engine.had:
            engine.had.append(event.version)
        if self._served is None or event.version > self._served:
            self._served = event.version

    def _engine_takes(self, version: Version) -> None:
        """Outside a sync, engines take the version of the run; whatever is newer is the version of a sync."""
        if self._synced is None:
            self._synced = version
        elif version > self._synced:
            if self._syncing is not None and version != self._syncing:
                self._wrong(4, f"engines take {version}, but the sync to {self._syncing} did not end")
            self._syncing = version

    def _weights_synced(self, event: j.WeightsSynced) -> None:
        if self._served is not None and event.version < self._served:
            self._wrong(4, f"the run went from {self._served} to {event.version}")
        for worker, engine in self._engines.items():
            if engine.version is not None and not engine.dead and engine.version != event.version:
                self._wrong(4, f"{worker} serves {engine.version} after a sync to {event.version}")
        self._served = self._synced = event.version
        self._syncing = None
        self._forget_versions()

    def _forget_versions(self) -> None:
        """Nothing older than the version of the run is taken any more, or than what is in flight is sampled with."""
        self._published = [version for version in self._published if self._synced is None or version >= self._synced]
        running = [trajectory for trajectory in self._trajectories.values() if not trajectory.ended]
        oldest = min((t.since for t in running if t.since is not None), default=self._synced)
        needed = {engine for trajectory in running for engine in trajectory.engines}
        self._engines = {id: e for id, e in self._engines.items() if not e.dead or id in needed}
        for engine in self._engines.values():
            engine.had = [had for had in engine.had if had == engine.version or oldest is None or had >= oldest]

    def _live_engine(self, worker: WorkerId, what: str) -> _Engine | None:
        engine = self._engines.get(worker)
        if engine is None or engine.dead or not engine.joined:
            self._wrong(4, f"{worker} {what}, but it is dead, or never joined")
        return engine

    # --- prompts and groups -----------------------------------------------------------------------------------------

    def _prompt_taken(self, event: j.PromptTaken) -> None:
        if event.ticket != self._next_ticket:
            self._wrong(1, f"ticket {event.ticket} was taken, {self._next_ticket} was next: a prompt was skipped")
        self._next_ticket = max(self._next_ticket, event.ticket + 1)
        task = event.prompt.task
        if waiting := self._waiting.get(task):
            self._wrong(1, f"ticket {event.ticket} was taken while {waiting} of {task} wait: passed over")
        self._tasks[event.ticket] = task
        self._move(event.ticket, "waiting")

    def _move(self, ticket: int, state: str) -> None:
        """A ticket changes its state; nothing is kept of a settled one."""
        task = self._tasks.get(ticket)
        if task is None:
            return  # of a ticket that was never taken, which has been said
        change = (state == "waiting") - (self._tickets.get(ticket) == "waiting")
        self._waiting[task] = self._waiting.get(task, 0) + change
        if state == "settled":
            self._tickets.pop(ticket, None)
            del self._tasks[ticket]
        else:
            self._tickets[ticket] = state

    def _group_opened(self, event: j.GroupOpened) -> None:
        if event.group != self._next_group:
            self._wrong(1, f"group {event.group} was opened, {self._next_group} was next")
        self._next_group = max(self._next_group, event.group + 1)
        if event.group in self._groups:
            self._wrong(1, f"group {event.group} was opened twice")
        if event.purpose is Purpose.TRAIN:
            state = self._tickets.get(event.ticket, "settled")
            if state != "waiting":
                self._wrong(1, f"group {event.group} was opened for ticket {event.ticket}, which is {state}")
            if state != "settled":
                self._move(event.ticket, "open")
            self._check_admission(event)
        self._groups[event.group] = _Group(event)

    def _check_admission(self, event: j.GroupOpened) -> None:
        """Open and ready groups fit into the batches that can still be claimed within the bound."""
        self._make(event.task, +1)
        run, served = self._run, self._served
        if run is None or served is None or event.task not in run.groups_per_batch:
            return
        mode = MODES[Mode(run.mode)]
        ahead = served.step + 1 + int(mode.overlap) - (self._step + len(self._claims))
        batches = ahead + run.alpha if mode.interrupt else min(ahead, 1)
        changes = [change for step in self._redistributed.values() for change in step]
        taken_over = sum(change.filled_by.get(event.task, 0) for change in changes)
        limit = batches * run.groups_per_batch[event.task] + run.extra_groups + taken_over
        making = self._making[event.task]
        if making > limit:
            self._wrong(2, f"{making} groups of {event.task} are in the making, at most {limit} may be")

    def _make(self, task: str, change: int) -> None:
        self._making[task] = self._making.get(task, 0) + change

    def _group_ended(self, event: j.GroupEnded) -> None:
        group = self._groups.pop(event.group, None)
        if group is None:
            self._wrong(1, f"group {event.group} ended twice, or was never opened")
            return
        if group.opened.purpose is Purpose.TRAIN and group.trained is None:
            self._make(group.opened.task, -1)
        if event.outcome is GroupOutcome.TRAINED:
            if group.trained is None:
                self._wrong(1, f"group {event.group} ended as trained, but no step trained it")
        elif group.trained is not None:
            self._wrong(1, f"group {event.group} was trained and ended as {event.outcome.value}")
        elif group.claim is not None:
            self._wrong(1, f"group {event.group} ended as {event.outcome.value} while it was claimed")
        self._settle(group, event)
        for id in group.members:
            if id in self._trajectories and self._trajectories[id].ended:
                del self._trajectories[id]

    def _settle(self, group: _Group, event: j.GroupEnded) -> None:
        if group.opened.purpose is Purpose.EVAL:
            if event.requeued or event.outcome is GroupOutcome.TRAINED:
                self._wrong(1, f"evaluation group {group.id} ended as {event.outcome.value}, requeued {event.requeued}")
            return
        ticket = group.opened.ticket
        if event.requeued and event.outcome in (GroupOutcome.TRAINED, GroupOutcome.FILTERED):
            self._wrong(1, f"group {group.id} ended as {event.outcome.value} and its prompt was queued again")
        if event.outcome is GroupOutcome.TRAINED:
            self._move(ticket, "trained")
            self._trained[group.id] = (group.trained or 0, ticket)
        elif event.requeued:
            self._move(ticket, "waiting")
        elif event.outcome in (GroupOutcome.FILTERED, GroupOutcome.FAILED):
            self._move(ticket, "settled")
        else:
            self._wrong(1, f"group {group.id} ended as {event.outcome.value} and its prompt was not queued again")

    # --- trajectories -----------------------------------------------------------------------------------------------

    def _trajectory_started(self, event: j.TrajectoryStarted) -> None:
        if event.trajectory != self._next_trajectory:
            self._wrong(1, f"trajectory {event.trajectory} was started, {self._next_trajectory} was next")
        self._next_trajectory = max(self._next_trajectory, event.trajectory + 1)
        group = self._groups.get(event.group)
        if group is None:
            self._wrong(1, f"trajectory {event.trajectory} was started for group {event.group}, which is not open")
            return
        self._trajectories[event.trajectory] = _Trajectory(event.trajectory, event.group)
        if event.trajectory not in group.members:
            group.members.append(event.trajectory)

    def _placed(self, event: j.Placed) -> None:
        trajectory = self._trajectories.get(event.trajectory)
        engine = self._live_engine(event.engine, f"got trajectory {event.trajectory}")
        if trajectory is None or engine is None:
            return
        if engine.version is None:
            self._wrong(4, f"trajectory {event.trajectory} was sent to {event.engine}, which has no weights")
        elif trajectory.last is not None and engine.version < trajectory.last:
            self._wrong(
                4, f"trajectory {event.trajectory} at {trajectory.last} moved to {event.engine} at {engine.version}"
            )
        trajectory.engine = event.engine
        trajectory.engines.append(event.engine)
        if engine.version is not None:
            trajectory.since = min(engine.version, trajectory.since or engine.version)

    def _turn_ended(self, event: j.TurnEnded) -> None:
        trajectory = self._trajectories.get(event.trajectory)
        if trajectory is None or trajectory.ended:
            self._wrong(1, f"a turn of trajectory {event.trajectory}, which does not run")
            return
        trajectory.turns += 1
        if event.turn != trajectory.turns:
            self._wrong(5, f"turn {event.turn} of trajectory {event.trajectory} came as number {trajectory.turns}")
        if sum(length for _, length in event.versions) != event.sampled:
            self._wrong(5, f"turn {event.turn} of trajectory {event.trajectory}: versions do not cover the tokens")
        trajectory.sampled += event.sampled
        if trajectory.engine != event.engine:
            self._wrong(4, f"trajectory {event.trajectory} was placed on {trajectory.engine}, {event.engine} answered")
        for version, _ in event.versions:
            self._token_version(trajectory, version)
        engine = self._engines.get(event.engine)
        if engine is not None and trajectory.engine == event.engine:
            trajectory.engines, trajectory.since = [event.engine], engine.version

    def _token_version(self, trajectory: _Trajectory, version: Version) -> None:
        if trajectory.last is not None and version < trajectory.last:
            self._wrong(4, f"trajectory {trajectory.id}: {version} after {trajectory.last}")
        if not any(version in self._engines[engine].had for engine in trajectory.engines if engine in self._engines):
            self._wrong(4, f"trajectory {trajectory.id} has tokens of {version}, which none of its engines served")
        trajectory.last = version
        if trajectory.first is None:
            trajectory.first = version

    def _reward_arrived(self, event: j.RewardArrived) -> None:
        trajectory = self._trajectories.get(event.trajectory)
        if trajectory is None or trajectory.ended or trajectory.reward is not None:
            self._wrong(1, f"a reward of trajectory {event.trajectory}, which does not wait for one")
        elif not math.isfinite(event.value):
            self._wrong(1, f"the reward of trajectory {event.trajectory} is {event.value}")
        else:
            trajectory.reward = event.value

    def _trajectory_ended(self, event: j.TrajectoryEnded) -> None:
        trajectory = self._trajectories.get(event.trajectory)
        if trajectory is None or trajectory.ended:
            self._wrong(1, f"trajectory {event.trajectory} ended twice, or was never started")
            return
        trajectory.ended = True
        if event.sampled != trajectory.sampled or event.turns != trajectory.turns:
            self._wrong(
                5, f"trajectory {event.trajectory} holds {event.sampled} tokens, its turns {trajectory.sampled}"
            )
        if (event.first, event.last) != (trajectory.first, trajectory.last):
            self._wrong(4, f"trajectory {event.trajectory} says versions {event.first}–{event.last}, its turns differ")
        result = event.outcome in TRAINABLE
        if result and (event.reward is None or event.reward != trajectory.reward):
            self._wrong(
                1, f"trajectory {event.trajectory} ended with {event.reward}; its reward was {trajectory.reward}"
            )
        if event.outcome in _FAILURES and event.reward is not None:
            self._wrong(1, f"trajectory {event.trajectory} is {event.outcome.value} and has a reward")
        group = self._groups.get(trajectory.group)
        if group is None:
            del self._trajectories[event.trajectory]
        elif result:
            group.results.append(event.trajectory)

    # --- batches ----------------------------------------------------------------------------------------------------

    def _batch_claimed(self, event: j.BatchClaimed) -> None:
        if event.claim in self._claims:
            self._wrong(1, f"claim {event.claim} was made twice")
        self._claims[event.claim] = event
        if event.step != self._step:
            self._wrong(1, f"claim {event.claim} is for step {event.step}; the lineage is at {self._step}")
        if self._served is not None and event.served != self._served:
            self._wrong(2, f"claim {event.claim} says that {event.served} is served; it is {self._served}")
        if self._syncing is not None:
            self._wrong(4, f"claim {event.claim} was made before the sync to {self._syncing} ended")
        groups = [self._claimed_group(event, id) for id in event.groups]
        known = [group for group in groups if group is not None]
        size = self._run.group_size if self._run is not None else 0
        # One more than the group needs may have ended before it could be stopped; the first ones count.
        if [id for group in known for id in group.results[:size]] != list(event.trajectories):
            self._wrong(1, f"claim {event.claim} does not hold exactly the first results of its groups")
        self._check_shares(event, known)
        self._check_staleness(event, known)

    def _claimed_group(self, event: j.BatchClaimed, id: GroupId) -> _Group | None:
        group = self._groups.get(id)
        if group is None or group.claim is not None or group.trained is not None:
            self._wrong(1, f"claim {event.claim} takes group {id}, which is not ready")
            return None
        if group.opened.purpose is Purpose.EVAL:
            self._wrong(1, f"claim {event.claim} takes evaluation group {id}")
        group.claim = event.claim
        self._make(group.opened.task, -1)
        return group

    def _check_shares(self, event: j.BatchClaimed, groups: list[_Group]) -> None:
        run = self._run
        if run is None:
            return
        wanted = Counter(run.groups_per_batch)
        for change in self._redistributed.pop(event.step, []):
            wanted.subtract(change.missing)
            wanted.update(change.filled_by)
        got = Counter(group.opened.task for group in groups)
        if {task: count for task, count in wanted.items() if count} != dict(got):
            self._wrong(3, f"claim {event.claim} holds {dict(got)} groups instead of {dict(wanted)}")
        if len(event.trajectories) != len(event.groups) * run.group_size:
            self._wrong(3, f"claim {event.claim} holds {len(event.trajectories)} trajectories: groups are not whole")

    def _check_staleness(self, event: j.BatchClaimed, groups: list[_Group]) -> None:
        run = self._run
        if run is None:
            return
        bounded = MODES[Mode(run.mode)].check_every_turn
        claimed, masked = set(event.trajectories), set(event.masked)
        for index, group in enumerate(groups):
            members = [self._trajectories[id] for id in group.members if id in claimed and id in self._trajectories]
            for member in members:
                if member.last is not None and member.last.step > event.served.step:
                    self._wrong(
                        2, f"claim {event.claim}: trajectory {member.id} has tokens of {member.last}, which is void"
                    )
            firsts = [member.first for member in members if member.id not in masked and member.first is not None]
            if not firsts:
                self._wrong(2, f"claim {event.claim}: group {group.id} has nothing to train")
                continue
            oldest = min(firsts)
            staleness = event.served.step - oldest.step
            if staleness < 0 or oldest.epoch > event.served.epoch:
                self._wrong(2, f"claim {event.claim}: group {group.id} of {oldest} is newer than {event.served}")
            elif bounded and staleness > run.alpha:
                self._wrong(2, f"claim {event.claim}: group {group.id} is {staleness} steps stale, α is {run.alpha}")
            if index < len(event.staleness) and event.staleness[index] != staleness:
                self._wrong(
                    2, f"claim {event.claim}: group {group.id} is {staleness} stale, {event.staleness[index]} said"
                )

    def _step_trained(self, event: j.StepTrained) -> None:
        claim = self._claims.pop(event.claim, None)
        if claim is None:
            self._wrong(1, f"a step was trained on claim {event.claim}, which is not out")
            return
        if event.version.step != claim.step + 1 or event.version.epoch != self._epoch:
            self._wrong(4, f"claim {event.claim} of step {claim.step} became {event.version} in epoch {self._epoch}")
        self._step = event.version.step
        self._check_liveness("step", event.at)
        for id in claim.groups:
            group = self._groups.get(id)
            if group is not None:
                group.claim, group.trained = None, event.version.step

    def _claim_returned(self, event: j.ClaimReturned) -> None:
        claim = self._claims.pop(event.claim, None)
        if claim is None:
            self._wrong(1, f"claim {event.claim} was returned, but is not out")
            return
        for id in claim.groups:
            group = self._groups.get(id)
            if group is not None:
                group.claim = None
                self._make(group.opened.task, +1)

    def _share_redistributed(self, event: j.ShareRedistributed) -> None:
        if sum(event.missing.values()) != sum(event.filled_by.values()):
            self._wrong(3, f"step {event.step}: {event.missing} was given up, {event.filled_by} was taken over")
        self._redistributed.setdefault(event.step, []).append(event)

    # --- lineage ----------------------------------------------------------------------------------------------------

    def _checkpoint_saved(self, event: j.CheckpointSaved) -> None:
        if event.version.step > self._step:
            self._wrong(1, f"a checkpoint of {event.version} while the lineage is at step {self._step}")
        self._saved = max(self._saved, event.version.step)
        for id, (step, ticket) in list(self._trained.items()):
            if step <= event.version.step:
                del self._trained[id]
                self._move(ticket, "settled")

    def _rolled_back(self, event: j.RolledBack) -> None:
        if event.step < self._saved:
            self._wrong(1, f"a roll-back to step {event.step}, although the checkpoint of {self._saved} was saved")
        void = {id: entry for id, entry in self._trained.items() if entry[0] > event.step}
        if set(void) != set(event.groups):
            self._wrong(1, f"the roll-back to step {event.step} names {len(event.groups)} groups; {len(void)} are void")
        for id, (_, ticket) in void.items():
            self._move(ticket, "waiting")
            del self._trained[id]
        self._step = event.step
        self._redistributed.clear()

    def _snapshot(self, event: j.Snapshot) -> None:
        """A resume believes the snapshot: it says what the events before it say."""
        said, running = event.state, [t for t in self._trajectories.values() if not t.ended]
        parts: dict[str, tuple[object, object]] = {
            "the epoch": (said.epoch, self._epoch),
            "the step": (said.step, self._step),
            "the next group, trajectory and ticket": (
                (said.next_group, said.next_trajectory, said.next_ticket),
                (self._next_group, self._next_trajectory, self._next_ticket),
            ),
            "the prompts that wait": (
                {ticket.number for ticket in said.waiting},
                {ticket for ticket, state in self._tickets.items() if state == "waiting"},
            ),
            "the open groups": ({group.group for group in said.groups}, set(self._groups)),
            "the open trajectories": (
                {t.trajectory: (t.turns, t.sampled, t.first, t.last) for t in said.trajectories},
                {t.id: (t.turns, t.sampled, t.first, t.last) for t in running},
            ),
            "the open claims": ({claim.claim for claim in said.claims}, set(self._claims)),
            "what was trained since the checkpoint": (
                {group.group: group.step for group in said.trained},
                {group: step for group, (step, _) in self._trained.items()},
            ),
        }
        for what, (stated, found) in parts.items():
            if stated != found:
                self._wrong(1, f"the snapshot and the events before it disagree about {what}")


_HANDLERS: dict[type, Callable[[Auditor, Any], None]] = {
    j.RunStarted: Auditor._run_started,
    j.RunResumed: Auditor._run_resumed,
    j.RunEnded: Auditor._run_ended,
    j.EpochStarted: Auditor._epoch_started,
    j.RolledBack: Auditor._rolled_back,
    j.CheckpointSaved: Auditor._checkpoint_saved,
    j.Snapshot: Auditor._snapshot,
    j.WorkerSpawned: Auditor._worker_spawned,
    j.WorkerJoined: Auditor._worker_joined,
    j.WorkerDied: Auditor._worker_died,
    j.VersionPublished: Auditor._version_published,
    j.EngineUpdated: Auditor._engine_updated,
    j.WeightsSynced: Auditor._weights_synced,
    j.PromptTaken: Auditor._prompt_taken,
    j.GroupOpened: Auditor._group_opened,
    j.GroupEnded: Auditor._group_ended,
    j.TrajectoryStarted: Auditor._trajectory_started,
    j.RewardArrived: Auditor._reward_arrived,
    j.TrajectoryEnded: Auditor._trajectory_ended,
    j.Placed: Auditor._placed,
    j.TurnEnded: Auditor._turn_ended,
    j.BatchClaimed: Auditor._batch_claimed,
    j.StepTrained: Auditor._step_trained,
    j.ClaimReturned: Auditor._claim_returned,
    j.ShareRedistributed: Auditor._share_redistributed,
    j.StallReported: Auditor._stall_reported,
}
