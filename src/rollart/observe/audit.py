"""Whether a journal keeps the rules of the design, judged from the journal alone.

Nothing that the control plane computed is believed: staleness, lags, shares, token counts and lineage are derived again
from the events below them and compared with what was written. The audit streams: it remembers what is in flight, plus
what was trained since the last checkpoint, so the journal of a month can be read.

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


class _Trajectory:
    __slots__ = ("ended", "engine", "engines", "first", "group", "id", "last", "reward", "sampled", "turns")

    def __init__(self, id: TrajectoryId, group: "_Group") -> None:
        self.id = id
        self.group = group
        self.turns = 0
        self.sampled = 0
        self.first: Version | None = None
        self.last: Version | None = None
        self.engine: WorkerId | None = None
        self.engines: list[WorkerId] = []
        self.reward: float | None = None
        self.ended: j.TrajectoryEnded | None = None


class _Group:
    __slots__ = ("claim", "id", "members", "opened", "results", "trained")

    def __init__(self, opened: j.GroupOpened) -> None:
        self.id = opened.group
        self.opened = opened
        self.members: dict[TrajectoryId, _Trajectory] = {}
        self.results: list[TrajectoryId] = []
        """Members that ended with a result, in that order."""
        self.claim: ClaimId | None = None
        self.trained: int | None = None


class _Engine:
    __slots__ = ("dead", "had", "joined", "version")

    def __init__(self) -> None:
        self.joined = False
        self.dead = False
        self.version: Version | None = None
        self.had: set[Version] = set()


_FAILURES = frozenset({Outcome.ENV_FAILED, Outcome.ENGINE_FAILED, Outcome.REWARD_FAILED})


def audit(events: Iterable[j.JournalEvent]) -> list[Violation]:
    """Every violation, in the order in which it shows."""
    auditor = Auditor()
    for event in events:
        auditor.take(event)
    return auditor.finish()


class Auditor:
    """Takes a journal event by event."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._count = 0
        self._run: j.RunStarted | None = None
        self._ended: j.RunEnded | None = None
        self._groups: dict[GroupId, _Group] = {}
        self._next_group = 0
        self._trajectories: dict[TrajectoryId, _Trajectory] = {}
        self._next_trajectory = 0
        self._claims: dict[ClaimId, j.BatchClaimed] = {}
        self._engines: dict[WorkerId, _Engine] = {}
        self._published: dict[Version, None] = {}
        self._newest: Version | None = None
        self._served: Version | None = None
        self._epoch = -1
        self._step = 0
        self._tickets: dict[int, str] = {}
        """Every ticket that is not settled: waiting, open, or trained."""
        self._next_ticket = 0
        self._tasks: dict[int, str] = {}
        self._waiting: Counter[str] = Counter()
        self._making: Counter[str] = Counter()
        """Training groups that are open or ready, by task."""
        self._trained: dict[GroupId, tuple[int, int, tuple[TrajectoryId, ...]]] = {}
        """Trained since the last checkpoint: step, ticket and trajectories."""
        self._redistributed: dict[int, list[j.ShareRedistributed]] = {}
        self._environments: Counter[str] = Counter()
        self._roles: dict[WorkerId, tuple[Role, str]] = {}
        self._step_bound_s = math.inf
        self._stepping_since = 0.0
        """The last step, or the last time that a trainer started or was lost."""
        self.slowest_step_s = 0.0
        self._at = -math.inf
        self._handlers: dict[type, Callable[[Any], None]] = {
            j.RunStarted: self._run_started,
            j.RunResumed: self._run_resumed,
            j.RunEnded: self._run_ended,
            j.EpochStarted: self._epoch_started,
            j.RolledBack: self._rolled_back,
            j.CheckpointSaved: self._checkpoint_saved,
            j.WorkerSpawned: self._worker_spawned,
            j.WorkerJoined: self._worker_joined,
            j.WorkerDied: self._worker_died,
            j.VersionPublished: self._version_published,
            j.EngineUpdated: self._engine_updated,
            j.WeightsSynced: self._weights_synced,
            j.PromptTaken: self._prompt_taken,
            j.GroupOpened: self._group_opened,
            j.GroupEnded: self._group_ended,
            j.TrajectoryStarted: self._trajectory_started,
            j.RewardArrived: self._reward_arrived,
            j.TrajectoryEnded: self._trajectory_ended,
            j.Placed: self._placed,
            j.TurnEnded: self._turn_ended,
            j.BatchClaimed: self._batch_claimed,
            j.StepTrained: self._step_trained,
            j.ClaimReturned: self._claim_returned,
            j.ShareRedistributed: self._share_redistributed,
            j.StallReported: self._stall_reported,
        }

    def take(self, event: j.JournalEvent) -> None:
        if self._run is None and not isinstance(event, j.RunStarted):
            self._wrong(1, "the journal does not begin with RunStarted")
            self._run = j.RunStarted(event.at, "", Mode.ROLLART.value, 0, 0, {}, 0)
        if self._ended is not None and not isinstance(event, j.RunResumed):
            self._wrong(1, f"{type(event).__name__} after the end of the run")
        if event.at < self._at and not isinstance(event, j.RunResumed):
            self._wrong(1, f"{type(event).__name__} at {event.at} s after an event at {self._at} s")
        self._at = event.at
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)
        self._count += 1

    def finish(self) -> list[Violation]:
        """The end of the journal: a run that ended has nothing open."""
        if self._ended is None:
            return self.violations
        for trajectory in self._trajectories.values():
            if trajectory.ended is None:
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
        return self.violations

    def _wrong(self, rule: int, what: str) -> None:
        self.violations.append(Violation(rule, self._count, what))

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
        self._environments.clear()
        self._roles.clear()
        self._served = None
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
        self._check_liveness("start of a trainer", event.at)

    def _check_liveness(self, what: str, at: float) -> None:
        """The clock runs from step to step; a trainer that starts or is lost sets it anew."""
        took_s, self._stepping_since = at - self._stepping_since, at
        self.slowest_step_s = max(self.slowest_step_s, took_s)
        if took_s > self._step_bound_s:
            self._wrong(8, f"{took_s:g} s for a {what}, the run's bound is {self._step_bound_s:g} s")

    # --- workers and versions ---------------------------------------------------------------------------------------

    def _worker_spawned(self, event: j.WorkerSpawned) -> None:
        if event.worker in self._roles:
            self._wrong(1, f"worker {event.worker} was started twice under one id")
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
        self._published[version] = None
        self._newest = version

    def _engine_updated(self, event: j.EngineUpdated) -> None:
        engine = self._live_engine(event.worker, f"updated to {event.version}")
        if event.version not in self._published:
            self._wrong(4, f"{event.worker} serves {event.version}, which was never published")
        if engine is None:
            return
        if engine.version is not None and event.version < engine.version:
            self._wrong(4, f"{event.worker} went back from {engine.version} to {event.version}")
        engine.version = event.version
        engine.had.add(event.version)
        if self._served is None or event.version > self._served:
            self._served = event.version

    def _weights_synced(self, event: j.WeightsSynced) -> None:
        if self._served is not None and event.version < self._served:
            self._wrong(4, f"the run went from {self._served} to {event.version}")
        for worker, engine in self._engines.items():
            if engine.version is not None and not engine.dead and engine.version != event.version:
                self._wrong(4, f"{worker} serves {engine.version} after a sync to {event.version}")
        self._served = event.version

    def _live_engine(self, worker: WorkerId, what: str) -> _Engine | None:
        engine = self._engines.get(worker)
        if engine is None or engine.dead or not engine.joined:
            self._wrong(4, f"{worker} {what}, but it {'is dead' if engine and engine.dead else 'never joined'}")
        return engine

    # --- prompts and groups -----------------------------------------------------------------------------------------

    def _prompt_taken(self, event: j.PromptTaken) -> None:
        if event.ticket != self._next_ticket:
            self._wrong(1, f"ticket {event.ticket} was taken, {self._next_ticket} was next: a prompt was skipped")
        self._next_ticket = max(self._next_ticket, event.ticket + 1)
        task = event.prompt.task
        if self._waiting[task]:
            self._wrong(1, f"ticket {event.ticket} was taken while {self._waiting[task]} of {task} wait: passed over")
        self._tasks[event.ticket] = task
        self._move(event.ticket, "waiting")

    def _move(self, ticket: int, state: str) -> None:
        """A ticket changes its state; nothing is kept of a settled one."""
        task = self._tasks.get(ticket)
        if task is None:
            return  # of a ticket that was never taken, which has been said
        self._waiting[task] += (state == "waiting") - (self._tickets.get(ticket) == "waiting")
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
        self._making[event.task] += 1
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

    def _group_ended(self, event: j.GroupEnded) -> None:
        group = self._groups.pop(event.group, None)
        if group is None:
            self._wrong(1, f"group {event.group} ended twice, or was never opened")
            return
        if group.opened.purpose is Purpose.TRAIN and group.trained is None:
            self._making[group.opened.task] -= 1
        if event.outcome is GroupOutcome.TRAINED:
            if group.trained is None:
                self._wrong(1, f"group {event.group} ended as trained, but no step trained it")
        elif group.trained is not None:
            self._wrong(1, f"group {event.group} was trained and ended as {event.outcome.value}")
        elif group.claim is not None:
            self._wrong(1, f"group {event.group} ended as {event.outcome.value} while it was claimed")
        self._settle(group, event)
        for member in group.members.values():
            if member.ended is not None:
                self._trajectories.pop(member.id, None)

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
            self._trained[group.id] = (group.trained or 0, ticket, tuple(group.members))
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
        trajectory = _Trajectory(event.trajectory, group)
        group.members[event.trajectory] = self._trajectories[event.trajectory] = trajectory

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

    def _turn_ended(self, event: j.TurnEnded) -> None:
        trajectory = self._trajectories.get(event.trajectory)
        if trajectory is None or trajectory.ended is not None:
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
        if trajectory is None or trajectory.ended is not None or trajectory.reward is not None:
            self._wrong(1, f"a reward of trajectory {event.trajectory}, which does not wait for one")
        elif not math.isfinite(event.value):
            self._wrong(1, f"the reward of trajectory {event.trajectory} is {event.value}")
        else:
            trajectory.reward = event.value

    def _trajectory_ended(self, event: j.TrajectoryEnded) -> None:
        trajectory = self._trajectories.get(event.trajectory)
        if trajectory is None or trajectory.ended is not None:
            self._wrong(1, f"trajectory {event.trajectory} ended twice, or was never started")
            return
        trajectory.ended = event
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
        if result:
            trajectory.group.results.append(event.trajectory)
        if trajectory.group.id not in self._groups:
            self._trajectories.pop(event.trajectory, None)

    # --- batches ----------------------------------------------------------------------------------------------------

    def _batch_claimed(self, event: j.BatchClaimed) -> None:
        if event.claim in self._claims:
            self._wrong(1, f"claim {event.claim} was made twice")
        self._claims[event.claim] = event
        if event.step != self._step:
            self._wrong(1, f"claim {event.claim} is for step {event.step}; the lineage is at {self._step}")
        if self._served is not None and event.served != self._served:
            self._wrong(2, f"claim {event.claim} says that {event.served} is served; it is {self._served}")
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
        self._making[group.opened.task] -= 1
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
            for id, member in group.members.items():
                if id in claimed and member.last is not None and member.last.step > event.served.step:
                    self._wrong(2, f"claim {event.claim}: trajectory {id} has tokens of {member.last}, which is void")
            firsts = [
                member.first
                for id, member in group.members.items()
                if id in claimed and id not in masked and member.first is not None
            ]
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
                self._making[group.opened.task] += 1

    def _share_redistributed(self, event: j.ShareRedistributed) -> None:
        if sum(event.missing.values()) != sum(event.filled_by.values()):
            self._wrong(3, f"step {event.step}: {event.missing} was given up, {event.filled_by} was taken over")
        self._redistributed.setdefault(event.step, []).append(event)

    # --- lineage ----------------------------------------------------------------------------------------------------

    def _checkpoint_saved(self, event: j.CheckpointSaved) -> None:
        if event.version.step > self._step:
            self._wrong(1, f"a checkpoint of {event.version} while the lineage is at step {self._step}")
        for id, (step, ticket, _) in list(self._trained.items()):
            if step <= event.version.step:
                del self._trained[id]
                self._move(ticket, "settled")

    def _rolled_back(self, event: j.RolledBack) -> None:
        void = {id: entry for id, entry in self._trained.items() if entry[0] > event.step}
        if set(void) != set(event.groups):
            self._wrong(1, f"the roll-back to step {event.step} names {len(event.groups)} groups; {len(void)} are void")
        for id, (_, ticket, _) in void.items():
            self._move(ticket, "waiting")
            del self._trained[id]
        self._step = event.step
        self._redistributed.clear()
