"""Records of every step, from the journal as it grows: for metrics files and live views.

Invariants: every trained step gives one `StepRecord`, every evaluation one `EvalRecord`, in order; a step counts what
was journalled since the previous one. A step that was rolled back and trained again gives two records.
"""

import math
from collections import Counter
from collections.abc import Iterator

import msgspec

from rollart.observe.bias import BiasTracker
from rollart.types import journal as j
from rollart.types.ids import ClaimId, GroupId, TrajectoryId
from rollart.types.reward_use import RewardUse
from rollart.types.trajectory import TRAINABLE, Purpose


class FunctionRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Use of one reward function in a step (`types.reward_use`)."""

    calls: int
    failed: int = 0
    requests: int = 0
    retries: int = 0
    hedges: int = 0
    fallbacks: int = 0
    kills: int = 0
    cold_starts: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    replica_s: float = 0.0
    cost: float = 0.0
    p50_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0


class StepRecord(msgspec.Struct, kw_only=True, tag="step"):
    """One trained step. Times are seconds since the start of the run, by the controller's clock."""

    step: int
    at: float
    train_s: float
    """From sending the claim to the trainer until it was trained."""
    rewards: dict[str, float] = {}
    """Mean reward per task of the training trajectories that finished between two claims (`FinishedRewards`)."""
    kept_rewards: dict[str, float] = {}
    """Mean reward per task of the batch."""
    reward_parts: dict[str, float] = {}
    """Means of rewards by name that training trajectories got since the previous step: `TASK/REWARD`, and
    `TASK/REWARD.PART` for named parts."""
    defaulted: dict[str, int] = {}
    """How many of them are defaults, because the reward failed."""
    staleness: list[int] = []
    """Staleness of the groups of the batch."""
    trajectories: int = 0
    """Trajectories in the batch."""
    outcomes: dict[str, int] = {}
    """Outcomes of the trajectories that ended since the previous step."""
    sampled_tokens: int = 0
    tokens_per_s: float = 0.0
    suspended_s: float = 0.0
    """Time for which syncs suspended the engines."""
    workers_lost: int = 0
    busy: dict[str, float] = {}
    """Share of time that each pool was busy."""
    metrics: dict[str, float] = {}
    """Metrics of the trainer."""
    functions: dict[str, FunctionRecord] = {}
    """Use of reward functions since the previous step, as `TASK/REWARD`."""
    bias: dict[str, float] = {}
    """Distance per task between the durations of offered and trained prompts, over the run so far (`observe.bias`)."""
    held_out: dict[str, float] = {}
    """Mean reward per task in its last evaluation."""


class EvalRecord(msgspec.Struct, kw_only=True, tag="eval"):
    step: int
    at: float
    task: str
    episodes: int
    mean_reward: float | None
    samples: int = 1
    pass_at: dict[str, float] = {}


Record = StepRecord | EvalRecord


class FinishedRewards:
    """Mean reward per task of the finished training trajectories, whatever the outcome of their groups.

    A batch shows less: with dynamic sampling it excludes groups in which all rewards are equal, and so most rewards of
    an agent that has learned its task. A trajectory counts for the first claim after its end: everything trained has
    finished by then, even if the step overlaps with rollout.
    """

    def __init__(self) -> None:
        self._groups: dict[GroupId, str] = {}
        """Task of every open training group."""
        self._running: dict[TrajectoryId, str] = {}
        self._rewards: dict[str, list[float]] = {}
        """Rewards since the last claim, by task."""
        self._claimed: dict[ClaimId, dict[str, list[float]]] = {}

    def take(self, event: j.JournalEvent) -> None:
        match event:
            case j.GroupOpened() if event.purpose is Purpose.TRAIN:
                self._groups[event.group] = event.task
            case j.GroupEnded():
                self._groups.pop(event.group, None)
            case j.TrajectoryStarted() if event.group in self._groups:
                self._running[event.trajectory] = self._groups[event.group]
            case j.TrajectoryEnded():
                task = self._running.pop(event.trajectory, None)
                if task is not None and event.reward is not None and event.outcome in TRAINABLE:
                    self._rewards.setdefault(task, []).append(event.reward)
            case j.BatchClaimed():
                self._claimed[event.claim], self._rewards = self._rewards, {}
            case j.ClaimReturned():
                for task, rewards in self._claimed.pop(event.claim, {}).items():
                    self._rewards.setdefault(task, []).extend(rewards)
            case _:
                pass

    def task_of(self, trajectory: TrajectoryId) -> str | None:
        """Task of a running training trajectory."""
        return self._running.get(trajectory)

    def pop(self, claim: ClaimId) -> dict[str, float]:
        """Means of a trained claim, by task in alphabetical order, without tasks where no trajectory finished."""
        finished = self._claimed.pop(claim, {})
        return {task: math.fsum(rewards) / len(rewards) for task, rewards in sorted(finished.items())}


def named_values(task: str, event: j.RewardGiven) -> Iterator[tuple[str, float]]:
    """The rewards of an event by name, and their parts."""
    for value in event.values:
        yield f"{task}/{event.name}", value
    for parts in event.parts:
        for part, value in parts.items():
            yield f"{task}/{event.name}.{part}", value


def function_record(use: RewardUse) -> FunctionRecord:
    """A use with its percentiles."""
    counts = {name: getattr(use, name) for name in use.__struct_fields__ if name != "latencies"}
    return FunctionRecord(**counts, p50_s=use.latency_s(0.5), p95_s=use.latency_s(0.95), p99_s=use.latency_s(0.99))


class NamedRewards:
    """Means of rewards by name, of training trajectories, between two steps."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._defaulted: Counter[str] = Counter()

    def add(self, task: str, event: j.RewardGiven) -> None:
        for name, value in named_values(task, event):
            self._values.setdefault(name, []).append(value)
        if event.defaulted:
            self._defaulted[f"{task}/{event.name}"] += len(event.trajectories)

    def pop(self) -> tuple[dict[str, float], dict[str, int]]:
        """Means, and the number of defaults, by name in alphabetical order."""
        means = {name: math.fsum(values) / len(values) for name, values in sorted(self._values.items())}
        defaulted = dict(sorted(self._defaulted.items()))
        self._values, self._defaulted = {}, Counter()
        return means, defaulted


class StepFold:
    """Consumes a journal event by event and returns records as they become complete."""

    def __init__(self) -> None:
        self._began_at = 0.0
        self._last_at = 0.0
        self._claims: dict[int, j.BatchClaimed] = {}
        self._complete: StepRecord | None = None
        """Trained; its time use is in the events that follow."""
        self._finished = FinishedRewards()
        self._named = NamedRewards()
        self._bias = BiasTracker()
        self._outcomes: Counter[str] = Counter()
        self._sampled = 0
        self._suspended_s = 0.0
        self._lost = 0
        self._held_out: dict[str, float] = {}

    def take(self, event: j.JournalEvent) -> list[Record]:
        records = [] if isinstance(event, j.PoolTime | j.RewardsUsed) else self.finish()
        self._finished.take(event)
        self._bias.take(event)
        match event:
            case j.RunStarted() | j.RunResumed():
                self._began_at = self._last_at = event.at
            case j.PoolTime() if self._complete is not None:
                total = sum(event.seconds.values())
                if total:
                    self._complete.busy[event.pool] = event.seconds.get(j.TimeUse.BUSY, 0.0) / total
            case j.RewardsUsed() if self._complete is not None:
                self._complete.functions = {name: function_record(use) for name, use in sorted(event.uses.items())}
            case j.TurnEnded():
                self._sampled += event.sampled
            case j.RewardGiven():
                task = self._finished.task_of(event.trajectories[0])
                if task is not None:
                    self._named.add(task, event)
            case j.TrajectoryEnded():
                self._outcomes[event.outcome.value] += 1
            case j.WeightsSynced():
                self._suspended_s += event.suspended_s
            case j.WorkerDied():
                self._lost += 1
            case j.BatchClaimed():
                self._claims[event.claim] = event
            case j.ClaimReturned():
                self._claims.pop(event.claim, None)
            case j.StepTrained():
                self._complete = self._step(event)
            case j.EvalEnded():
                at = event.at - self._began_at
                if event.mean_reward is not None:
                    self._held_out[event.task] = event.mean_reward
                records.append(
                    EvalRecord(
                        step=event.step,
                        at=at,
                        task=event.task,
                        episodes=event.episodes,
                        mean_reward=event.mean_reward,
                        samples=event.samples,
                        pass_at=event.pass_at,
                    )
                )
            case _:
                pass
        return records

    def finish(self) -> list[Record]:
        """The last step, if it was not returned yet."""
        complete, self._complete = self._complete, None
        return [] if complete is None else [complete]

    def _step(self, event: j.StepTrained) -> StepRecord:
        claim = self._claims.pop(event.claim, None)
        seconds = event.at - self._last_at
        parts, defaulted = self._named.pop()
        record = StepRecord(
            step=event.version.step,
            at=event.at - self._began_at,
            train_s=event.seconds,
            rewards=self._finished.pop(event.claim),
            reward_parts=parts,
            defaulted=defaulted,
            outcomes=dict(sorted(self._outcomes.items())),
            sampled_tokens=self._sampled,
            tokens_per_s=self._sampled / seconds if seconds > 0 else 0.0,
            suspended_s=self._suspended_s,
            workers_lost=self._lost,
            busy={},
            metrics=dict(event.metrics),
            bias=self._bias.distances(),
            held_out=dict(self._held_out),
        )
        if claim is not None:
            record.kept_rewards = dict(claim.rewards)
            record.staleness = list(claim.staleness)
            record.trajectories = len(claim.trajectories)
        self._last_at = event.at
        self._outcomes.clear()
        self._sampled = 0
        self._suspended_s = 0.0
        self._lost = 0
        return record
