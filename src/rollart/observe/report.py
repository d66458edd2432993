"""What a run did, from its journal alone.

Every started trajectory is counted under exactly one outcome and every sampled token under exactly one heading:
trained, or wasted by a named cause, or spent on evaluation.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from rollart.types import journal as j
from rollart.types.ids import GroupId, TrajectoryId
from rollart.types.messages import Role
from rollart.types.trajectory import GroupOutcome, Outcome, Purpose
from rollart.types.versions import Version


class KeptAgainstStarted(msgspec.Struct):
    """Whether choosing the first to finish chose the short ones: means over trained and over all with a result."""

    kept_tokens: float = 0.0
    started_tokens: float = 0.0
    kept_reward: float = 0.0
    started_reward: float = 0.0


class Report(msgspec.Struct, kw_only=True):
    """The figures of a run. Shares are of worker-seconds; tokens are sampled ones unless said otherwise."""

    name: str = ""
    mode: str = ""
    alpha: int = 0
    seed: int = 0
    steps: int = 0
    seconds: float = 0.0
    first_step_s: float = 0.0
    step_s: float = 0.0
    """Mean time between two trained steps, the first left out; that of the first if there is no other."""
    trajectories_per_s: float = 0.0
    tokens_per_s: float = 0.0
    pools: dict[str, dict[str, float]] = {}
    """Worker-seconds of every pool by cause, `busy` among them; slot-seconds for environments and rewards."""
    engines: dict[str, int] = {}
    """Engines of every generation pool."""
    staleness: dict[int, int] = {}
    """Claimed groups by staleness."""
    lag: dict[int, int] = {}
    outcomes: dict[str, int] = {}
    group_outcomes: dict[str, int] = {}
    sampled_tokens: int = 0
    trained_tokens: int = 0
    wasted_tokens: dict[str, int] = {}
    evaluation_tokens: int = 0
    prefilled_tokens: int = 0
    recomputed_tokens: int = 0
    recomputed_trajectories: int = 0
    suspended_s: float = 0.0
    """Per sync: how long no engine took a step."""
    exposed_s: float = 0.0
    """Per sync: how long it waited for publication and staging."""
    placements: dict[str, dict[str, int]] = {}
    """Turns per task and hardware class."""
    fallbacks: dict[str, int] = {}
    reward: dict[str, float] = {}
    """Mean reward of trained trajectories per task."""
    evaluations: list[j.EvalEnded] = []
    redistributed: int = 0
    workers_lost: int = 0
    stalls: int = 0
    selection: KeptAgainstStarted = msgspec.field(default_factory=KeptAgainstStarted)
    ended: str = ""
    open_trajectories: int = 0
    """Started and without an outcome: 0 in every journal that ended."""

    @property
    def wasted_token_share(self) -> float:
        return sum(self.wasted_tokens.values()) / self.sampled_tokens if self.sampled_tokens else 0.0

    def engine_seconds_per_step(self) -> dict[str, float]:
        """Where the time of the average engine went, per step. The causes add up to the time of a step, so the
        difference between two runs is explained cause by cause."""
        total: Counter[str] = Counter()
        for pool in self.engines:
            total.update(self.pools.get(pool, {}))
        count = sum(self.engines.values()) * self.steps
        return {cause: seconds / count for cause, seconds in sorted(total.items())} if count else {}


class _Trajectory(msgspec.Struct):
    group: GroupId
    outcome: Outcome | None = None
    sampled: int = 0
    reward: float | None = None
    masked: bool = False
    recomputed: int = 0


def make_report(events: Iterable[j.JournalEvent]) -> Report:
    """Fold a journal."""
    fold = _Fold()
    for event in events:
        fold.take(event)
    return fold.finish()


class _Fold:
    def __init__(self) -> None:
        self.report = Report()
        self.groups: dict[GroupId, j.GroupOpened] = {}
        self.group_ends: dict[GroupId, GroupOutcome] = {}
        self.trajectories: dict[TrajectoryId, _Trajectory] = {}
        self.hardware: dict[TrajectoryId, str] = {}
        self.trained_at: list[float] = []
        self.started_at = self.rollout_from = self.at = self.offset = 0.0
        self.masked: set[TrajectoryId] = set()
        self.void: set[GroupId] = set()
        """Trained in steps that were rolled back."""
        self.staleness: Counter[int] = Counter()
        self.lag: Counter[int] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.pools: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.turns: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.engine_names: dict[str, set[str]] = {}
        self.syncs = 0
        self.claimed: dict[int, tuple[TrajectoryId, ...]] = {}
        self.trained: list[TrajectoryId] = []

    def take(self, event: j.JournalEvent) -> None:
        if isinstance(event, j.RunResumed):
            # The new controller has a clock of its own; its time follows that of the old one.
            self.offset = self.at - event.at
        self.at = event.at + self.offset
        report = self.report
        match event:
            case j.TurnEnded():
                trajectory = self.trajectories[event.trajectory]
                trajectory.recomputed += event.recomputed
                report.prefilled_tokens += event.prefilled
                report.recomputed_tokens += event.recomputed
                self.turns[self.groups[trajectory.group].task][self.hardware[event.trajectory]] += 1
            case j.Placed():
                self.hardware[event.trajectory] = event.hardware
                if event.reason:
                    self.fallbacks[event.reason] += 1
            case j.TrajectoryStarted():
                self.trajectories[event.trajectory] = _Trajectory(event.group)
            case j.TrajectoryEnded():
                trajectory = self.trajectories[event.trajectory]
                trajectory.outcome = event.outcome
                trajectory.sampled += event.sampled
                trajectory.reward = event.reward
                trajectory.masked = event.masked
            case j.GroupOpened():
                self.groups[event.group] = event
            case j.GroupEnded():
                self.group_ends[event.group] = event.outcome
            case j.BatchClaimed():
                self.claimed[event.claim] = event.trajectories
                self.masked.update(event.masked)
                self.staleness.update(event.staleness)
                self.lag.update(event.lag)
            case j.StepTrained():
                self.trained_at.append(self.at)
                self.trained.extend(self.claimed.get(event.claim, ()))
            case j.RolledBack():
                self.void.update(event.groups)
                self.trained = [id for id in self.trained if self.trajectories[id].group not in self.void]
            case j.TurnAborted():
                self.trajectories[event.trajectory].sampled += event.sampled
            case j.WeightsSynced():
                self.syncs += 1
                report.suspended_s += event.suspended_s
                report.exposed_s += event.exposed_s
            case j.PoolTime():
                for cause, seconds in event.seconds.items():
                    self.pools[event.pool][cause] += seconds
            case _:
                self.take_rare(event)

    def take_rare(self, event: j.JournalEvent) -> None:
        report = self.report
        match event:
            case j.RunStarted():
                report.name, report.mode, report.alpha, report.seed = event.name, event.mode, event.alpha, event.seed
                self.started_at = self.at
            case j.VersionPublished():
                if event.version == Version(0, 0):
                    self.rollout_from = self.at
            case j.RunEnded():
                report.steps, report.ended = event.steps, event.reason or "done"
                report.seconds = self.at - self.started_at
            case j.EvalEnded():
                report.evaluations.append(event)
            case j.WorkerSpawned():
                if event.role is Role.ENGINE:
                    self.engine_names.setdefault(event.pool, set()).add(event.worker.rpartition(".")[0])
            case j.ShareRedistributed():
                report.redistributed += 1
            case j.WorkerDied():
                report.workers_lost += 1
            case j.StallReported():
                report.stalls += 1
            case _:
                pass

    def finish(self) -> Report:
        report = self.report
        report.staleness = dict(sorted(self.staleness.items()))
        report.lag = dict(sorted(self.lag.items()))
        report.fallbacks = dict(sorted(self.fallbacks.items()))
        report.pools = {pool: dict(sorted(causes.items())) for pool, causes in sorted(self.pools.items())}
        report.placements = {task: dict(sorted(turns.items())) for task, turns in sorted(self.turns.items())}
        report.group_outcomes = dict(sorted(Counter(end.value for end in self.group_ends.values()).items()))
        report.engines = {pool: len(names) for pool, names in sorted(self.engine_names.items())}
        if self.syncs:
            report.suspended_s /= self.syncs
            report.exposed_s /= self.syncs
        self.count_time()
        self.count_trajectories()
        return report

    def count_time(self) -> None:
        report, times = self.report, self.trained_at
        if not times:
            return
        report.first_step_s = times[0] - self.rollout_from
        report.step_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else report.first_step_s
        span = times[-1] - self.rollout_from
        if span > 0:
            report.trajectories_per_s = len(self.trained) / span
            report.tokens_per_s = sum(self.trajectories[id].sampled for id in self.trained) / span

    def count_trajectories(self) -> None:
        report = self.report
        trained = set(self.trained)
        wasted: Counter[str] = Counter()
        outcomes: Counter[str] = Counter()
        rewards: defaultdict[str, list[float]] = defaultdict(list)
        for id, trajectory in self.trajectories.items():
            if trajectory.outcome is None:
                report.open_trajectories += 1
                continue
            outcomes[trajectory.outcome.value] += 1
            report.sampled_tokens += trajectory.sampled
            report.recomputed_trajectories += trajectory.recomputed > 0
            group = self.groups[trajectory.group]
            if group.purpose is Purpose.EVAL:
                report.evaluation_tokens += trajectory.sampled
            elif id not in trained:
                wasted[self.cause_of_waste(trajectory)] += trajectory.sampled
            elif trajectory.masked or id in self.masked:
                wasted["masked"] += trajectory.sampled
            else:
                report.trained_tokens += trajectory.sampled
            if id in trained and trajectory.reward is not None:
                rewards[group.task].append(trajectory.reward)
        report.outcomes = dict(sorted(outcomes.items()))
        report.wasted_tokens = {cause: tokens for cause, tokens in sorted(wasted.items()) if tokens}
        report.reward = {task: sum(values) / len(values) for task, values in sorted(rewards.items())}
        self.compare_kept(trained)

    def cause_of_waste(self, trajectory: _Trajectory) -> str:
        """A trajectory with a result is wasted by what became of its group."""
        if trajectory.outcome in (Outcome.COMPLETED, Outcome.TRUNCATED):
            end = self.group_ends.get(trajectory.group)
            if end is GroupOutcome.TRAINED:
                # Trained and rolled back, or it finished when its group was complete without it.
                return "rollback" if trajectory.group in self.void else Outcome.REDUNDANT.value
            return "open" if end is None else end.value
        return "open" if trajectory.outcome is None else trajectory.outcome.value

    def compare_kept(self, trained: set[TrajectoryId]) -> None:
        selection = self.report.selection
        results = {id: t for id, t in self.trajectories.items() if t.reward is not None and self.is_training(t)}
        kept = [t for id, t in results.items() if id in trained]
        if kept:
            selection.kept_tokens = sum(t.sampled for t in kept) / len(kept)
            selection.kept_reward = sum(t.reward or 0.0 for t in kept) / len(kept)
        if results:
            selection.started_tokens = sum(t.sampled for t in results.values()) / len(results)
            selection.started_reward = sum(t.reward or 0.0 for t in results.values()) / len(results)

    def is_training(self, trajectory: _Trajectory) -> bool:
        return self.groups[trajectory.group].purpose is Purpose.TRAIN
