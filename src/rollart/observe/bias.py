"""Bias of training towards what is fast, short or easy: offered against trained distributions.

Per prompt: each time a prompt is offered, its value is the mean over the members that its group started; all groups are
compared with the trained ones. Per member: all started members are compared with those whose tokens were trained.
Members that were stopped count with what they had by then, so their values are lower bounds. Rewards are
those of members with a result.

Left out: cancelled groups, which the end of a run or a roll-back ended, and filtered ones, which were left out on
purpose (dynamic sampling).

The distance of two distributions is that of Kolmogorov and Smirnov: the largest difference between the shares of values
below any limit. It is 0 if training sees what was offered, and 0.3 if, say, the slowest 30 % are never trained. Values
are counted in bins of 9 % width, so the memory is bounded and a distance may come out a little too small.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rollart.types import journal as j
from rollart.types.ids import GroupId, TrajectoryId
from rollart.types.trajectory import GroupOutcome, Purpose

OFFERED = (GroupOutcome.TRAINED, GroupOutcome.STALE, GroupOutcome.FAILED, GroupOutcome.REDUNDANT)
"""Ends of groups that are compared."""
QUANTITIES = ("duration_s", "turns", "tokens", "reward")
BINS_PER_OCTAVE = 8
SMALLEST = 1e-6
WARN_DISTANCE = 0.1
WARN_COUNT = 200
"""Groups offered before a distance is taken seriously: below, chance alone makes one of 0.1."""


class Distribution(msgspec.Struct, array_like=True):
    """Values in bins."""

    count: int = 0
    total: float = 0.0
    bins: dict[int, int] = {}

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        bin = _bin(value)
        self.bins[bin] = self.bins.get(bin, 0) + 1

    def merge(self, other: "Distribution") -> None:
        self.count += other.count
        self.total += other.total
        for bin, count in other.bins.items():
            self.bins[bin] = self.bins.get(bin, 0) + count

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


def _bin(value: float) -> int:
    """Number of the bin of a value; bins are in the order of their values."""
    if abs(value) < SMALLEST:
        return 0
    number = 1 + math.floor(BINS_PER_OCTAVE * math.log2(abs(value) / SMALLEST))
    return number if value > 0 else -number


def distance(one: Distribution, other: Distribution) -> float:
    """Kolmogorov-Smirnov distance; 0 if there is nothing to compare."""
    if not one.count or not other.count:
        return 0.0
    below_one = below_other = 0
    largest = 0.0
    for bin in sorted({*one.bins, *other.bins}):
        below_one += one.bins.get(bin, 0)
        below_other += other.bins.get(bin, 0)
        largest = max(largest, abs(below_one / one.count - below_other / other.count))
    return largest


class Compared(msgspec.Struct):
    """Offered against trained values of one quantity."""

    offered: float = 0.0
    """Mean."""
    trained: float = 0.0
    distance: float = 0.0
    count: int = 0
    """Number of values offered."""


class BiasFold(msgspec.Struct, array_like=True):
    """Offered and trained values of each quantity."""

    offered: dict[str, Distribution] = {}
    trained: dict[str, Distribution] = {}

    def add(self, values: Mapping[str, float], *, trained: bool) -> None:
        for quantity, value in values.items():
            self.offered.setdefault(quantity, Distribution()).add(value)
            if trained:
                self.trained.setdefault(quantity, Distribution()).add(value)

    def merge(self, other: "BiasFold") -> None:
        """Add the values of another fold."""
        for own, others in ((self.offered, other.offered), (self.trained, other.trained)):
            for quantity, distribution in others.items():
                own.setdefault(quantity, Distribution()).merge(distribution)

    def compared(self) -> dict[str, Compared]:
        nothing = Distribution()
        return {
            quantity: Compared(
                self.offered[quantity].mean,
                self.trained.get(quantity, nothing).mean,
                distance(self.offered[quantity], self.trained.get(quantity, nothing)),
                self.offered[quantity].count,
            )
            for quantity in QUANTITIES
            if quantity in self.offered
        }


def means(members: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each quantity over the members that have it."""
    values: dict[str, list[float]] = {}
    for member in members:
        for quantity, value in member.items():
            values.setdefault(quantity, []).append(value)
    return {quantity: math.fsum(found) / len(found) for quantity, found in values.items()}


def warnings(per_prompt: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One sentence per task whose training drifts away from what is offered, with the remedy.

    `per_prompt` has, for every task and quantity, what `BiasFold.compared` made.
    """
    found = []
    for task, quantities in per_prompt.items():
        worst = max(quantities.items(), key=lambda item: item[1].distance, default=None)
        if worst is None:
            continue
        quantity, compared = worst
        if compared.distance >= WARN_DISTANCE and compared.count >= WARN_COUNT:
            found.append(
                f"task {task}: trained prompts differ from offered ones in {quantity} (distance "
                f"{compared.distance:.2f}, mean {compared.trained:.3g} instead of {compared.offered:.3g}): "
                f"slow or failing prompts drop out. Raise tasks.{task}.alpha, lower batch.min_group_size or "
                f"tasks.{task}.stale_retries, or look for what fails"
            )
    return found


class BiasTracker:
    """Distances per task of a run as it goes, for metrics: of the duration of offered and trained prompts.

    Unlike the report it does not wait for checkpoints: what a roll-back makes void stays counted.
    """

    def __init__(self) -> None:
        self._tasks: dict[GroupId, str] = {}
        self._open: dict[GroupId, dict[TrajectoryId, float]] = {}
        """Members of training groups that have not ended, with the time of their start."""
        self._durations: dict[GroupId, list[float]] = {}
        self._ended: dict[GroupId, GroupOutcome] = {}
        self._group_of: dict[TrajectoryId, GroupId] = {}
        self._folds: dict[str, BiasFold] = {}

    def take(self, event: j.JournalEvent) -> None:
        match event:
            case j.GroupOpened() if event.purpose is Purpose.TRAIN:
                self._tasks[event.group] = event.task
                self._open[event.group], self._durations[event.group] = {}, []
            case j.TrajectoryStarted() if event.group in self._tasks:
                self._open[event.group][event.trajectory] = event.at
                self._group_of[event.trajectory] = event.group
            case j.TrajectoryEnded() if event.trajectory in self._group_of:
                group = self._group_of.pop(event.trajectory)
                self._durations[group].append(event.at - self._open[group].pop(event.trajectory))
                self._settle(group)
            case j.GroupEnded() if event.group in self._tasks:
                self._ended[event.group] = event.outcome
                self._settle(event.group)
            case _:
                pass

    def distances(self) -> dict[str, float]:
        """Kolmogorov-Smirnov distance by task, over the run so far."""
        return {task: fold.compared()["duration_s"].distance for task, fold in sorted(self._folds.items())}

    def _settle(self, group: GroupId) -> None:
        """Count a group once it and all its members have ended."""
        if group not in self._ended or self._open[group]:
            return
        outcome, durations, task = self._ended.pop(group), self._durations.pop(group), self._tasks.pop(group)
        del self._open[group]
        if durations and outcome in OFFERED:
            values = {"duration_s": math.fsum(durations) / len(durations)}
            self._folds.setdefault(task, BiasFold()).add(values, trained=outcome is GroupOutcome.TRAINED)
