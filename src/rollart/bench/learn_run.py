"""The runs of `rollart bench learn`, and their learning curves.

Times come from the journals, success from the checkpoints, which are evaluated after their run and without latency. So
evaluation takes no time or cores from a timed run, and all arms are evaluated alike, on the same prompts with the same
seeds.
"""

import asyncio
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rollart.app.api import merged
from rollart.app.checkpoints import CHECKPOINTS
from rollart.app.evaluation import config_for, play
from rollart.app.run_folder import JOURNAL
from rollart.app.running import RuntimeKind, carry_out, new_run, require, with_model
from rollart.backends.trainers.checkpoint import Checkpoints
from rollart.bench.common import say
from rollart.bench.runs import Events, Tables, trained_batches
from rollart.config.modes import Mode
from rollart.config.schema import RunConfig
from rollart.observe.bias import BiasFold
from rollart.observe.journal import read_journal
from rollart.observe.report import ReportFold
from rollart.types import journal as j
from rollart.types.trajectory import GroupOutcome

SYNC = "sync"
"""The arm that the others are compared with."""
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t, for 1, 2, … degrees of freedom."""


class Point(NamedTuple):
    """Success of a version, and the cost of reaching it."""

    step: int
    trajectories: int
    """Trained trajectories up to this step."""
    seconds: float
    """From the start of the first episode to the end of this step."""
    success: float
    """On held-out prompts; see `Success`."""
    kinds: Mapping[str, float] = MappingProxyType({})


class Success(NamedTuple):
    """Mean reward on held-out prompts: the mean over their kinds, and by kind if the work has several."""

    mean: float
    kinds: Mapping[str, float] = MappingProxyType({})

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {each:.0%}" for kind, each in self.kinds.items())
        return f"{self.mean:.0%} ({kinds})" if kinds else f"{self.mean:.0%}"


class Learnt(NamedTuple):
    """One arm with one seed."""

    curve: list[Point]
    stale_share: float
    """Stale groups, as a share of trained and stale ones."""
    bias: Mapping[str, float] = MappingProxyType({})
    """Distance between offered and trained prompts, by quantity; see `observe.bias`."""


Arms = Mapping[str, Mapping[int, Learnt]]
"""By arm and seed; all arms have the same seeds."""


class Bench:
    """All arms of a seed start from the same model; every seed has its own."""

    def __init__(self, tables: Tables, folder: Path, runtime: RuntimeKind = RuntimeKind.RAY) -> None:
        require(runtime)
        self._tables = tables
        self._folder = folder
        self._runtime = runtime

    def measure(self, seeds: Sequence[int]) -> dict[str, Any]:
        arms: dict[str, dict[int, Learnt]] = {arm: {} for arm in self._tables["arms"]}
        for seed in seeds:
            for arm, learnt in self._arms(seed):
                arms[arm][seed] = learnt
        return learn_figures(arms)

    def _arms(self, seed: int) -> Iterator[tuple[str, Learnt]]:
        folder = self._folder / f"seed-{seed}"
        run = {**self._tables["run"], "seed": seed}
        start = with_model(new_run({**run, "model": self._tables["model"]}).config, folder)
        before = self._success(start, Path(str(start.model)))
        for arm, changes in self._tables["arms"].items():
            say(f"seed {seed}, {arm} ...")
            plan = new_run({**merged(run, changes), "model": start.model})
            carry_out(plan, self._runtime, folder / arm)
            checkpoints = Checkpoints(folder / arm / CHECKPOINTS)
            success = {
                version.step: self._success(plan.config, checkpoints.folder(version)) for version in checkpoints.held()
            }
            say(f"seed {seed}, {arm}: {', '.join(map(str, (before, *success.values())))}")
            events = list(read_journal(folder / arm / JOURNAL))
            yield arm, Learnt(curve_of(events, {0: before, **success}), stale_share(events), prompt_bias(events))

    def _success(self, config: RunConfig, model: Path) -> Success:
        kinds = self._tables.get("eval_kinds", {})
        if not kinds:
            return Success(self._mean_reward(config, model, {}))
        by_kind = {kind: self._mean_reward(config, model, settings) for kind, settings in kinds.items()}
        return Success(statistics.fmean(by_kind.values()), by_kind)

    def _mean_reward(self, config: RunConfig, model: Path, settings: Tables) -> float:
        ((name, task),) = config.tasks.items()
        changes = {"inject": (), "environment_settings": {**task.environment_settings, **settings}}
        tasks = {name: task.model_copy(update=changes)}
        alike = config.model_copy(update={"mode": Mode.ROLLART, "tasks": tasks})
        ended = asyncio.run(play(config_for(alike, model, name, self._tables["eval_episodes"])))
        assert ended.mean_reward is not None, "play raises if nothing was scored"
        return ended.mean_reward


# --- from a journal -------------------------------------------------------------------------------------------------


def curve_of(events: Events, success: Mapping[int, Success]) -> list[Point]:
    """The steps whose success is known, in order."""
    began = next(event.at for event in events if isinstance(event, j.GroupOpened))
    trained = {each.batch.step + 1: each for each in trained_batches(events)}
    return [
        Point(
            step,
            sum(len(trained[each].batch.trajectories) for each in range(1, step + 1)),
            trained[step].at - began if step else 0.0,
            success[step].mean,
            success[step].kinds,
        )
        for step in sorted(success)
    ]


def stale_share(events: Events) -> float:
    ends = [event.outcome for event in events if isinstance(event, j.GroupEnded)]
    stale, trained = ends.count(GroupOutcome.STALE), ends.count(GroupOutcome.TRAINED)
    return stale / (stale + trained)


def prompt_bias(events: Events) -> dict[str, float]:
    fold, prompts = ReportFold(), BiasFold()
    for event in events:
        fold.take(event)
    fold.finish()
    for each in fold.prompts.values():
        prompts.merge(each)
    return {quantity: compared.distance for quantity, compared in prompts.compared().items()}


# --- figures --------------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A mean and its 95 % interval by Student's t (none for a single value), and the smallest of the values.

    The smallest of n independent values exceeds their median with probability 2⁻ⁿ, whatever their distribution: with
    five it is a lower bound of the median at 97 %. Student's interval assumes a normal distribution.
    """

    mean: float
    low: float | None
    high: float | None
    worst: float


def interval(values: Sequence[float]) -> Interval:
    """Interval of a mean over seeds.

    >>> [round(each, 3) for each in interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484, 1.0]
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None, mean)
    margin = T_975[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5
    return Interval(mean, mean - margin, mean + margin, min(values))


def learn_figures(arms: Arms) -> dict[str, Any]:
    """All arms against sync: in points at equal trained trajectories, paired by seed, and in time."""
    sync = arms[SYNC]
    others = [arm for arm in arms if arm != SYNC]
    points = {arm: [_points(arms[arm][seed], sync[seed]) for seed in sync] for arm in others}
    means = {arm: mean_curve([learnt.curve for learnt in by_seed.values()]) for arm, by_seed in arms.items()}
    aim = means[SYNC][-1]
    equal = {arm: next(point for point in curve if point.step == aim.step) for arm, curve in means.items()}
    finals = _finals(arms, aim.step)
    return {
        **{f"points_{arm}": interval([each[-1] for each in points[arm]])._asdict() for arm in others},
        **{f"curve_points_{arm}": interval(list(map(statistics.fmean, points[arm])))._asdict() for arm in others},
        **{f"time_ratio_{arm}": _ratio(time_to_reach(means[arm], aim.success), aim.seconds) for arm in others},
        "success": {arm: {"before": means[arm][0].success, "after": equal[arm].success} for arm in arms},
        "seconds": {arm: equal[arm].seconds for arm in arms},
        "stale_share": {arm: statistics.fmean(each.stale_share for each in arms[arm].values()) for arm in arms},
        "prompt_bias": {arm: _mean_bias(list(arms[arm].values())) for arm in arms},
        "finals": finals,
        "points_by_seed": {
            arm: {seed: 100 * (finals[arm][seed] - finals[SYNC][seed]) for seed in finals[SYNC]} for arm in others
        },
        "kinds": {kind: _of_kind(arms, kind, aim.step) for kind in next(iter(sync.values())).curve[-1].kinds},
        "arms": {
            arm: {
                str(seed): [{**point._asdict(), "kinds": dict(point.kinds)} for point in learnt.curve]
                for seed, learnt in by_seed.items()
            }
            for arm, by_seed in arms.items()
        },
    }


def _points(learnt: Learnt, sync: Learnt) -> list[float]:
    """Lead of an arm over sync in points, at every evaluated step of sync except the start, which is the same."""
    success = {point.step: point.success for point in learnt.curve}
    return [100 * (success[point.step] - point.success) for point in sync.curve if point.step]


def _finals(arms: Arms, step: int, kind: str | None = None) -> dict[str, dict[str, float]]:
    """Success after a step by arm and seed, of one kind or of all."""

    def final(learnt: Learnt) -> float:
        point = next(point for point in learnt.curve if point.step == step)
        return point.success if kind is None else point.kinds[kind]

    return {arm: {str(seed): final(learnt) for seed, learnt in by_seed.items()} for arm, by_seed in arms.items()}


def _of_kind(arms: Arms, kind: str, step: int) -> dict[str, Any]:
    finals = _finals(arms, step, kind)
    sync = finals[SYNC]
    before = statistics.fmean(learnt.curve[0].kinds[kind] for learnt in arms[SYNC].values())
    return {
        "before": before,
        "after": {arm: statistics.fmean(by_seed.values()) for arm, by_seed in finals.items()},
        "finals": finals,
        **{
            f"points_{arm}": interval([100 * (by_seed[seed] - sync[seed]) for seed in sync])._asdict()
            for arm, by_seed in finals.items()
            if arm != SYNC
        },
    }


def _mean_bias(seeds: Sequence[Learnt]) -> dict[str, float]:
    return {quantity: statistics.fmean(each.bias[quantity] for each in seeds) for quantity in seeds[0].bias}


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """Mean over seeds, step by step."""
    return [
        Point(
            at[0].step,
            at[0].trajectories,
            statistics.fmean(point.seconds for point in at),
            statistics.fmean(point.success for point in at),
        )
        for at in zip(*curves, strict=True)
    ]


def time_to_reach(curve: Sequence[Point], success: float) -> float | None:
    """Seconds until the curve first reaches this success, interpolated linearly; None if it never does."""
    if curve[0].success >= success:
        return curve[0].seconds
    for before, after in pairwise(curve):
        if after.success >= success:
            share = (success - before.success) / (after.success - before.success)
            return before.seconds + share * (after.seconds - before.seconds)
    return None


def _ratio(seconds: float | None, of: float) -> float | None:
    return None if seconds is None else seconds / of
