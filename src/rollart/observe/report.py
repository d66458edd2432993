"""Report of a run, from its journal alone.

Every started trajectory is counted under exactly one outcome and every sampled token under exactly one heading:
trained, wasted by a named cause, or spent on evaluation.

The fold streams: a group whose outcome is final, because it was not trained or because a checkpoint holds it, is added
to the totals and forgotten. The rest is plain data, bounded by what is in flight and what the last two checkpoints
settled, plus one entry per evaluation: a `ReportFold` can be encoded in the middle of a journal, decoded and continued.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from rollart.observe.bias import OFFERED, BiasFold, Compared, means
from rollart.observe.report_parts import Decision, Redundancy
from rollart.observe.steady import Period, Steady
from rollart.observe.steps import named_values
from rollart.types import journal as j
from rollart.types.failures import StopReason
from rollart.types.ids import ClaimId, GroupId, TrajectoryId
from rollart.types.messages import Role
from rollart.types.reward_use import RewardUse, add_uses
from rollart.types.trajectory import TRAINABLE, GroupOutcome, Outcome, Purpose
from rollart.types.versions import Version


class Report(msgspec.Struct, kw_only=True):
    """The figures of a run. Shares are of worker-seconds; tokens are sampled ones unless stated otherwise."""

    name: str = ""
    mode: str = ""
    alpha: int = 0
    seed: int = 0
    steps: int = 0
    seconds: float = 0.0
    first_step_s: float = 0.0
    step_s: float = 0.0
    """Mean time between two trained steps, without the first; that of the first if there is no other."""
    trajectories_per_s: float = 0.0
    tokens_per_s: float = 0.0
    pools: dict[str, dict[j.TimeUse, float]] = {}
    """Worker-seconds of every pool by use; slot-seconds for environments and rewards."""
    engines: dict[str, int] = {}
    """Engines of every generation pool."""
    staleness: dict[int, int] = {}
    """Claimed groups by staleness."""
    lag: dict[int, int] = {}
    outcomes: dict[str, int] = {}
    group_outcomes: dict[str, int] = {}
    filtered: dict[str, int] = {}
    """Complete groups that were not trained, by the reason for filtering."""
    sampled_tokens: int = 0
    trained_tokens: int = 0
    wasted_tokens: dict[str, int] = {}
    evaluation_tokens: int = 0
    prefilled_tokens: int = 0
    recomputed_tokens: int = 0
    recomputed_trajectories: int = 0
    suspended_s: float = 0.0
    """Per sync: time without engine steps."""
    exposed_s: float = 0.0
    """Per sync: time waiting for publication and staging."""
    steady: Steady = msgspec.field(default_factory=Steady)
    placements: dict[str, dict[str, int]] = {}
    """Turns per task and hardware class."""
    fallbacks: dict[str, int] = {}
    affinity: dict[str, str] = {}
    """Why each task is on the hardware class that it found by measurement."""
    elasticity: dict[str, str] = {}
    """Why each elastic pool has as many engines as it has."""
    resizes: int = 0
    """Times that the number of a pool's engines changed."""
    decisions: list[Decision] = []
    """The last `MAX_DECISIONS` assignments by measurement."""
    moves: int = 0
    """Times that a task changed its class, after the first."""
    reward: dict[str, float] = {}
    """Mean reward per task of all finished training trajectories, including those of filtered and stale groups."""
    kept_reward: dict[str, float] = {}
    """Mean reward per task of the trained trajectories."""
    reward_parts: dict[str, float] = {}
    """Mean of every named reward of finished training trajectories, as `TASK/REWARD`, and of its named parts, as
    `TASK/REWARD.PART`."""
    rewards_defaulted: dict[str, int] = {}
    """Number of training trajectories in which a reward failed and has its default, as `TASK/REWARD`."""
    functions: dict[str, RewardUse] = {}
    """Use of reward functions, of training and evaluation, as `TASK/REWARD`."""
    evaluations: list[j.EvalEnded] = []
    redistributed: int = 0
    workers_lost: int = 0
    stalls: int = 0
    bias: dict[str, dict[str, Compared]] = {}
    """Per task and quantity: offered against trained prompts (`observe.bias`)."""
    member_bias: dict[str, dict[str, Compared]] = {}
    """The same for members of groups."""
    redundancy: dict[str, Redundancy] = {}
    """Per task, of runs with extra members."""
    prompts_lost: int = 0
    """Losses of prompts to the staleness bound: groups that ended as stale or lost members."""
    members_replaced: int = 0
    """Late members that were replaced before they would have missed the staleness bound."""
    own_bounds: int = 0
    """Groups that got a staleness bound of their own."""
    ended: str = ""
    """Empty until the run ends; then `done`, or the error that stopped it."""
    stop: StopReason | None = None
    """Why it ended; None until then."""
    open_trajectories: int = 0
    """Started and without an outcome: 0 in every journal that ended."""

    @property
    def wasted_token_share(self) -> float:
        return sum(self.wasted_tokens.values()) / self.sampled_tokens if self.sampled_tokens else 0.0

    def engine_seconds_per_step(self) -> dict[j.TimeUse, float]:
        """Time of the average engine per step, by cause. The causes add up to the duration of a step, so the difference
        between two runs is explained cause by cause. With elastic pools they add up to less: the average is over all
        engines that there ever were."""
        total: Counter[j.TimeUse] = Counter()
        for pool in self.engines:
            total.update(self.pools.get(pool, {}))
        count = sum(self.engines.values()) * self.steps
        return {cause: seconds / count for cause, seconds in sorted(total.items())} if count else {}


MAX_DECISIONS = 20
LATE = "aborted late"
"""Waste: tokens of a turn whose end was reported after its trajectory was settled."""

Key = TypeVar("Key", j.TimeUse, str, int)


class _Trajectory(msgspec.Struct, array_like=True):
    group: GroupId
    outcome: Outcome | None = None
    sampled: int = 0
    reward: float | None = None
    masked: bool = False
    recomputed: int = 0
    trained: bool = False
    """Trained in a step that was not rolled back."""
    started_at: float | None = None
    """None in folds that an older version of rollart wrote."""
    ended_at: float = 0.0
    turns: int = 0


class _Group(msgspec.Struct, array_like=True):
    task: str
    purpose: Purpose
    members: list[TrajectoryId] = []
    running: int = 0
    """Members without an outcome."""
    outcome: GroupOutcome | None = None
    trained_step: int | None = None
    void: bool = False
    """Trained in a step that was rolled back."""
    final: bool = False
    """Only the end of an aborted turn may still be reported; the next checkpoint settles it."""
    claimed_at: float = 0.0


class _Sum(msgspec.Struct, array_like=True):
    """Sums over trajectories, their tokens and rewards."""

    count: int = 0
    tokens: int = 0
    reward: float = 0.0

    def add(self, tokens: int, reward: float) -> None:
        self.count += 1
        self.tokens += tokens
        self.reward += reward


def make_report(events: Iterable[j.JournalEvent]) -> Report:
    """Fold a journal."""
    fold = ReportFold()
    for event in events:
        fold.take(event)
    return fold.finish()


class ReportFold(msgspec.Struct, kw_only=True):
    """Consumes a journal event by event; raises KeyError at an event about something that was never started.

    All its state is in fields, and is carried when a journal is pruned.
    """

    totals: Report = msgspec.field(default_factory=Report)
    """Totals of what is settled; until `finish`, means are sums and dictionaries are unordered."""
    groups: dict[GroupId, _Group] = {}
    trajectories: dict[TrajectoryId, _Trajectory] = {}
    next_trajectory: int = 0
    hardware: dict[TrajectoryId, str] = {}
    """Hardware class of each running trajectory."""
    claimed: dict[ClaimId, tuple[tuple[GroupId, ...], tuple[TrajectoryId, ...]]] = {}
    started_at: float = 0.0
    rollout_from: float = 0.0
    at: float = 0.0
    offset: float = 0.0
    first_trained_at: float = 0.0
    last_trained_at: float = 0.0
    steps_trained: int = 0
    engine_places: dict[str, dict[str, None]] = {}
    syncs: int = 0
    steady: Period = msgspec.field(default_factory=Period)
    recent: Period = msgspec.field(default_factory=Period)
    """Steps trained since a group was opened; they join the steady period once another group is opened."""
    suspended_s: float = 0.0
    """Suspended seconds since the last trained step."""
    trained: _Sum = msgspec.field(default_factory=_Sum)
    rewards: dict[str, _Sum] = {}
    """Sums over trained trajectories with a reward, by task."""
    finished: dict[str, _Sum] = {}
    """Sums over all finished training trajectories, by task."""
    named: dict[str, _Sum] = {}
    """Sums over named rewards and their parts."""
    group_size: int = 0
    prompts: dict[str, BiasFold] = {}
    """Bias per prompt, by task."""
    members: dict[str, BiasFold] = {}

    def take(self, event: j.JournalEvent) -> None:
        if isinstance(event, j.RunResumed):
            # The new controller has its own clock; its time follows that of the old one.
            self.offset = self.at - event.at
        self.at = event.at + self.offset
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)

    def finish(self) -> Report:
        """Report at the end of the journal. The fold cannot be used afterwards."""
        for id in list(self.groups):
            self._settle(id)
        report = self.totals
        report.staleness = _sorted(report.staleness)
        report.lag = _sorted(report.lag)
        report.fallbacks = _sorted(report.fallbacks)
        report.affinity = dict(sorted(report.affinity.items()))
        report.elasticity = dict(sorted(report.elasticity.items()))
        report.pools = {pool: _sorted(causes) for pool, causes in sorted(report.pools.items())}
        report.placements = {task: _sorted(turns) for task, turns in sorted(report.placements.items())}
        report.outcomes = _sorted(report.outcomes)
        report.group_outcomes = _sorted(report.group_outcomes)
        report.filtered = _sorted(report.filtered)
        report.wasted_tokens = {cause: tokens for cause, tokens in _sorted(report.wasted_tokens).items() if tokens}
        report.engines = {pool: len(places) for pool, places in sorted(self.engine_places.items())}
        report.reward = {task: total.reward / total.count for task, total in sorted(self.finished.items())}
        report.kept_reward = {task: total.reward / total.count for task, total in sorted(self.rewards.items())}
        report.reward_parts = {name: total.reward / total.count for name, total in sorted(self.named.items())}
        report.rewards_defaulted = _sorted(report.rewards_defaulted)
        report.functions = _sorted(report.functions)
        if self.syncs:
            report.suspended_s /= self.syncs
            report.exposed_s /= self.syncs
        report.bias = {task: fold.compared() for task, fold in sorted(self.prompts.items())}
        report.member_bias = {task: fold.compared() for task, fold in sorted(self.members.items())}
        report.redundancy = dict(sorted(report.redundancy.items()))
        report.steady = self.steady.shares()
        self._count_time()
        return report

    def _count_time(self) -> None:
        report, first, last = self.totals, self.first_trained_at, self.last_trained_at
        if not self.steps_trained:
            return
        report.first_step_s = first - self.rollout_from
        report.step_s = (last - first) / (self.steps_trained - 1) if self.steps_trained > 1 else report.first_step_s
        span = last - self.rollout_from
        if span > 0:
            report.trajectories_per_s = self.trained.count / span
            report.tokens_per_s = self.trained.tokens / span

    # --- the run ----------------------------------------------------------------------------------------------------

    def _run_started(self, event: j.RunStarted) -> None:
        report = self.totals
        report.name, report.mode, report.alpha, report.seed = event.name, event.mode, event.alpha, event.seed
        self.started_at = self.at
        self.group_size = event.group_size

    def _run_resumed(self, event: j.RunResumed) -> None:  # noqa: ARG002
        self.totals.ended, self.totals.stop = "", None

    def _run_ended(self, event: j.RunEnded) -> None:
        self.totals.steps, self.totals.ended = event.steps, event.reason or "done"
        self.totals.stop = event.stop
        self.totals.seconds = self.at - self.started_at

    def _eval_ended(self, event: j.EvalEnded) -> None:
        self.totals.evaluations.append(event)

    def _share_redistributed(self, event: j.ShareRedistributed) -> None:  # noqa: ARG002
        self.totals.redistributed += 1

    def _stall_reported(self, event: j.StallReported) -> None:  # noqa: ARG002
        self.totals.stalls += 1

    def _pool_time(self, event: j.PoolTime) -> None:
        causes = self.totals.pools.setdefault(event.pool, {})
        for cause, seconds in event.seconds.items():
            causes[cause] = causes.get(cause, 0.0) + seconds
        if self.steps_trained > 1 and self.at == self.last_trained_at:  # of a step, and neither the first nor the end
            self.recent.add_pool(event)

    def _rewards_used(self, event: j.RewardsUsed) -> None:
        add_uses(self.totals.functions, event.uses)

    # --- workers and versions ---------------------------------------------------------------------------------------

    def _worker_spawned(self, event: j.WorkerSpawned) -> None:
        if event.role is Role.ENGINE:
            self.engine_places.setdefault(event.pool, {})[event.worker.rpartition(".")[0]] = None

    def _worker_died(self, event: j.WorkerDied) -> None:  # noqa: ARG002
        self.totals.workers_lost += 1

    def _version_published(self, event: j.VersionPublished) -> None:
        if event.version == Version(0, 0):
            self.rollout_from = self.at

    def _weights_synced(self, event: j.WeightsSynced) -> None:
        self.syncs += 1
        self.suspended_s += event.suspended_s
        self.totals.suspended_s += event.suspended_s
        self.totals.exposed_s += event.exposed_s

    # --- groups and trajectories ------------------------------------------------------------------------------------

    def _group_opened(self, event: j.GroupOpened) -> None:
        self.groups[event.group] = _Group(event.task, event.purpose)
        self.totals.own_bounds += event.alpha is not None
        if self.recent.seconds and event.purpose is Purpose.TRAIN:
            self.steady.add(self.recent)
            self.recent = Period()

    def _members_lost(self, event: j.MembersLost) -> None:
        self.totals.prompts_lost += 1
        self.totals.own_bounds += event.alpha is not None

    def _member_replaced(self, _: j.MemberReplaced) -> None:
        self.totals.members_replaced += 1

    def _redundancy_changed(self, event: j.RedundancyChanged) -> None:
        self.totals.redundancy.setdefault(event.task, Redundancy()).extra = event.extra

    def _affinity_changed(self, event: j.AffinityChanged) -> None:
        report = self.totals
        report.affinity.update(event.why)
        report.moves += sum(task in event.before for task in event.why)
        decision = Decision(self.at - self.started_at, event.cause, list(event.why.values()))
        report.decisions = [*report.decisions, decision][-MAX_DECISIONS:]

    def _engines_changed(self, event: j.EnginesChanged) -> None:
        self.totals.elasticity[event.pool] = event.why
        self.totals.resizes += 1

    def _group_ended(self, event: j.GroupEnded) -> None:
        self.groups[event.group].outcome = event.outcome
        self.totals.prompts_lost += event.outcome is GroupOutcome.STALE
        if event.outcome is GroupOutcome.FILTERED:
            _count(self.totals.filtered, event.cause)

    def _trajectory_started(self, event: j.TrajectoryStarted) -> None:
        group = self.groups[event.group]
        group.members.append(event.trajectory)
        group.running += 1
        self.trajectories[event.trajectory] = _Trajectory(event.group, started_at=self.at)
        self.next_trajectory = max(self.next_trajectory, event.trajectory + 1)

    def _placed(self, event: j.Placed) -> None:
        self.hardware[event.trajectory] = event.hardware
        if event.reason:
            _count(self.totals.fallbacks, event.reason)

    def _turn_ended(self, event: j.TurnEnded) -> None:
        trajectory, report = self.trajectories[event.trajectory], self.totals
        trajectory.recomputed += event.recomputed
        report.prefilled_tokens += event.prefilled
        report.recomputed_tokens += event.recomputed
        task = self.groups[trajectory.group].task
        _count(report.placements.setdefault(task, {}), self.hardware[event.trajectory])

    def _turn_aborted(self, event: j.TurnAborted) -> None:
        trajectory = self.trajectories.get(event.trajectory)
        if trajectory is not None:
            trajectory.sampled += event.sampled
        elif event.trajectory < self.next_trajectory:
            self.totals.sampled_tokens += event.sampled
            _count(self.totals.wasted_tokens, LATE, event.sampled)
        else:
            raise KeyError(event.trajectory)

    def _reward_given(self, event: j.RewardGiven) -> None:
        group = self.groups[self.trajectories[event.trajectories[0]].group]
        if group.purpose is not Purpose.TRAIN:
            return
        for name, value in named_values(group.task, event):
            self.named.setdefault(name, _Sum()).add(0, value)
        if event.defaulted:
            _count(self.totals.rewards_defaulted, f"{group.task}/{event.name}", len(event.trajectories))

    def _trajectory_ended(self, event: j.TrajectoryEnded) -> None:
        trajectory = self.trajectories[event.trajectory]
        if trajectory.outcome is None:
            self.groups[trajectory.group].running -= 1
        trajectory.outcome = event.outcome
        trajectory.ended_at, trajectory.turns = self.at, event.turns
        trajectory.sampled += event.sampled
        trajectory.reward = event.reward
        trajectory.masked = trajectory.masked or event.masked
        self.hardware.pop(event.trajectory, None)

    # --- batches and lineage ----------------------------------------------------------------------------------------

    def _batch_claimed(self, event: j.BatchClaimed) -> None:
        self.claimed[event.claim] = (event.groups, event.trajectories)
        for group in event.groups:
            if group in self.groups:
                self.groups[group].claimed_at = self.at
        for id in event.masked:
            self.trajectories[id].masked = True
        for counts, values in ((self.totals.staleness, event.staleness), (self.totals.lag, event.lag)):
            for value in values:
                _count(counts, value)

    def _claim_returned(self, event: j.ClaimReturned) -> None:
        self.claimed.pop(event.claim, None)

    def _step_trained(self, event: j.StepTrained) -> None:
        if self.steps_trained:
            self.recent.seconds += self.at - self.last_trained_at
            self.recent.suspended += self.suspended_s
        else:
            self.first_trained_at = self.at
        self.suspended_s = 0.0
        self.last_trained_at = self.at
        self.steps_trained += 1
        groups, trajectories = self.claimed.pop(event.claim, ((), ()))
        for group in groups:
            if group in self.groups:
                self.groups[group].trained_step = event.version.step
        for id in trajectories:
            self.trajectories[id].trained = True

    def _rolled_back(self, event: j.RolledBack) -> None:
        for id in event.groups:
            group = self.groups[id]
            group.void = True
            for member in group.members:
                self.trajectories[member].trained = False

    def _checkpoint_saved(self, event: j.CheckpointSaved) -> None:
        """Settle what was final at the previous checkpoint: everything it waited for has been reported since."""
        for id, group in list(self.groups.items()):
            if group.final:
                self._settle(id)
            elif group.outcome is not None and not group.running:
                waits = group.outcome is GroupOutcome.TRAINED and not group.void
                group.final = not waits or (group.trained_step is not None and group.trained_step <= event.version.step)

    # --- totals -----------------------------------------------------------------------------------------------------

    def _settle(self, id: GroupId) -> None:
        """Add a group and its members to the totals, and forget them."""
        group = self.groups.pop(id)
        if group.outcome is not None:
            _count(self.totals.group_outcomes, group.outcome.value)
        # One that is missing was started twice, which the audit reports.
        members = [self.trajectories.pop(member) for member in group.members if member in self.trajectories]
        if group.purpose is Purpose.TRAIN:
            self._settle_selection(group, members)
        for trajectory in members:
            if trajectory.outcome is None:
                self.totals.open_trajectories += 1
            else:
                self._settle_trajectory(group, trajectory, trajectory.outcome)

    def _settle_selection(self, group: _Group, members: list[_Trajectory]) -> None:
        """Add a group to the bias statistics, and its extra members to those of redundancy."""
        trained = group.outcome is GroupOutcome.TRAINED
        if group.outcome not in OFFERED or group.void:
            return
        values = [_values(member) for member in members]
        self.prompts.setdefault(group.task, BiasFold()).add(means(values), trained=trained)
        fold = self.members.setdefault(group.task, BiasFold())
        for member, found in zip(members, values, strict=True):
            fold.add(found, trained=member.trained and not member.masked)
        if trained:
            self._settle_redundancy(group, members)

    def _settle_redundancy(self, group: _Group, members: list[_Trajectory]) -> None:
        """Add the cost of extra members, and how much longer the group would have waited without them."""
        size = self.group_size
        trained = [member for member in members if member.trained]
        redundant = [member for member in members if member.outcome is Outcome.REDUNDANT]
        extra = len(trained) + len(redundant) - size
        if not size or extra <= 0:
            return
        entry = self.totals.redundancy.setdefault(group.task, Redundancy())
        entry.started += extra
        entry.trained += max(0, len(trained) - size)
        entry.redundant_tokens += sum(member.sampled for member in redundant)
        ends = sorted(member.ended_at for member in trained)
        if len(ends) >= size:
            waited = max(member.ended_at if member.trained else group.claimed_at for member in members[:size])
            entry.saved_s += max(0.0, waited - ends[size - 1])

    def _settle_trajectory(self, group: _Group, trajectory: _Trajectory, outcome: Outcome) -> None:
        report, tokens, reward = self.totals, trajectory.sampled, trajectory.reward
        _count(report.outcomes, outcome.value)
        report.sampled_tokens += tokens
        report.recomputed_trajectories += trajectory.recomputed > 0
        if group.purpose is Purpose.EVAL:
            report.evaluation_tokens += tokens
        elif not trajectory.trained:
            _count(report.wasted_tokens, _cause_of_waste(group, outcome), tokens)
        elif trajectory.masked:
            _count(report.wasted_tokens, "masked", tokens)
        else:
            report.trained_tokens += tokens
        if trajectory.trained:
            self.trained.add(tokens, 0.0)
        if reward is None:
            return
        if trajectory.trained:
            self.rewards.setdefault(group.task, _Sum()).add(tokens, reward)
        if group.purpose is Purpose.TRAIN and outcome in TRAINABLE:
            self.finished.setdefault(group.task, _Sum()).add(tokens, reward)


def _values(trajectory: _Trajectory) -> dict[str, float]:
    """Quantities of a member in which bias is measured (`observe.bias`)."""
    values = {"turns": float(trajectory.turns), "tokens": float(trajectory.sampled)}
    if trajectory.started_at is not None:
        values["duration_s"] = trajectory.ended_at - trajectory.started_at
    if trajectory.reward is not None:
        values["reward"] = trajectory.reward
    return values


def _cause_of_waste(group: _Group, outcome: Outcome) -> str:
    """A trajectory with a result is wasted by the outcome of its group."""
    if outcome not in TRAINABLE:
        return outcome.value
    if group.outcome is GroupOutcome.TRAINED:
        # Trained and rolled back, or finished after its group was complete without it.
        return "rollback" if group.void else Outcome.REDUNDANT.value
    return "open" if group.outcome is None else group.outcome.value


def _count(counts: dict[Key, int], key: Key, number: int = 1) -> None:
    counts[key] = counts.get(key, 0) + number


Value = TypeVar("Value")


def _sorted(counts: Mapping[Key, Value]) -> dict[Key, Value]:
    return dict(sorted(counts.items()))


_HANDLERS: dict[type, Callable[[ReportFold, Any], None]] = {
    j.RunStarted: ReportFold._run_started,
    j.RunResumed: ReportFold._run_resumed,
    j.RunEnded: ReportFold._run_ended,
    j.EvalEnded: ReportFold._eval_ended,
    j.ShareRedistributed: ReportFold._share_redistributed,
    j.StallReported: ReportFold._stall_reported,
    j.PoolTime: ReportFold._pool_time,
    j.RewardsUsed: ReportFold._rewards_used,
    j.WorkerSpawned: ReportFold._worker_spawned,
    j.WorkerDied: ReportFold._worker_died,
    j.VersionPublished: ReportFold._version_published,
    j.WeightsSynced: ReportFold._weights_synced,
    j.GroupOpened: ReportFold._group_opened,
    j.MembersLost: ReportFold._members_lost,
    j.MemberReplaced: ReportFold._member_replaced,
    j.RedundancyChanged: ReportFold._redundancy_changed,
    j.AffinityChanged: ReportFold._affinity_changed,
    j.EnginesChanged: ReportFold._engines_changed,
    j.GroupEnded: ReportFold._group_ended,
    j.TrajectoryStarted: ReportFold._trajectory_started,
    j.Placed: ReportFold._placed,
    j.TurnEnded: ReportFold._turn_ended,
    j.TurnAborted: ReportFold._turn_aborted,
    j.RewardGiven: ReportFold._reward_given,
    j.TrajectoryEnded: ReportFold._trajectory_ended,
    j.BatchClaimed: ReportFold._batch_claimed,
    j.ClaimReturned: ReportFold._claim_returned,
    j.StepTrained: ReportFold._step_trained,
    j.RolledBack: ReportFold._rolled_back,
    j.CheckpointSaved: ReportFold._checkpoint_saved,
}
