"""What happened in every step, from the journal as it grows: for metrics files and for whoever watches a run.

What holds: every trained step gives one `StepRecord`, every evaluation one `EvalRecord`, in their order; what is
counted in a step is what was journalled since the one before it. A step that was rolled back and trained again is told
twice, as it happened.
"""

from collections import Counter

import msgspec

from rollart.types import journal as j


class StepRecord(msgspec.Struct, kw_only=True, tag="step"):
    """One trained step. Times are seconds since the run began, by the controller's own clock."""

    step: int
    at: float
    train_s: float
    """From the claim's way to the trainer until it was trained."""
    rewards: dict[str, float] = {}
    """Mean reward of the batch per task."""
    staleness: list[int] = []
    """Of the groups of the batch."""
    trajectories: int = 0
    """In the batch."""
    outcomes: dict[str, int] = {}
    """Of the trajectories that ended since the step before."""
    sampled_tokens: int = 0
    tokens_per_s: float = 0.0
    suspended_s: float = 0.0
    """How long syncs suspended the engines."""
    workers_lost: int = 0
    busy: dict[str, float] = {}
    """Share of its time that each pool worked."""
    metrics: dict[str, float] = {}
    """The trainer's own."""


class EvalRecord(msgspec.Struct, kw_only=True, tag="eval"):
    step: int
    at: float
    task: str
    episodes: int
    mean_reward: float | None


Record = StepRecord | EvalRecord


class StepFold:
    """Takes a journal event by event and gives records as they become complete."""

    def __init__(self) -> None:
        self._began_at = 0.0
        self._last_at = 0.0
        self._claims: dict[int, j.BatchClaimed] = {}
        self._complete: StepRecord | None = None
        """Trained; where the time went comes in the events right after it."""
        self._outcomes: Counter[str] = Counter()
        self._sampled = 0
        self._suspended_s = 0.0
        self._lost = 0

    def take(self, event: j.JournalEvent) -> list[Record]:
        records = [] if isinstance(event, j.PoolTime) else self.finish()
        match event:
            case j.RunStarted() | j.RunResumed():
                self._began_at = self._last_at = event.at
            case j.PoolTime() if self._complete is not None:
                total = sum(event.seconds.values())
                if total:
                    self._complete.busy[event.pool] = event.seconds.get("busy", 0.0) / total
            case j.TurnEnded():
                self._sampled += event.sampled
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
                records.append(
                    EvalRecord(
                        step=event.step,
                        at=at,
                        task=event.task,
                        episodes=event.episodes,
                        mean_reward=event.mean_reward,
                    )
                )
            case _:
                pass
        return records

    def finish(self) -> list[Record]:
        """The last step, if it was not given yet."""
        complete, self._complete = self._complete, None
        return [] if complete is None else [complete]

    def _step(self, event: j.StepTrained) -> StepRecord:
        claim = self._claims.pop(event.claim, None)
        seconds = event.at - self._last_at
        record = StepRecord(
            step=event.version.step,
            at=event.at - self._began_at,
            train_s=event.seconds,
            outcomes=dict(sorted(self._outcomes.items())),
            sampled_tokens=self._sampled,
            tokens_per_s=self._sampled / seconds if seconds > 0 else 0.0,
            suspended_s=self._suspended_s,
            workers_lost=self._lost,
            busy={},
            metrics=dict(event.metrics),
        )
        if claim is not None:
            record.rewards = dict(claim.rewards)
            record.staleness = list(claim.staleness)
            record.trajectories = len(claim.trajectories)
        self._last_at = event.at
        self._outcomes.clear()
        self._sampled = 0
        self._suspended_s = 0.0
        self._lost = 0
        return record
