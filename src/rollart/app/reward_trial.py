"""Re-scoring of a run's stored transcripts with a reward function."""

import asyncio
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from rollart.app.run_folder import CONFIG, TRANSCRIPTS
from rollart.app.transcript_store import StoredTranscript, read_transcripts
from rollart.backends.rewards.scorer import BadReward, Scorer
from rollart.ports.reward import RewardKind
from rollart.types.errors import RequestError
from rollart.types.trajectory import TRAINABLE

SAME = 1e-9
"""Rewards that differ by no more than this are the same."""


class Tried(msgspec.Struct, frozen=True):
    """A transcript that was scored again. `before` is None if its trajectory ended without a reward."""

    trajectory: int
    task: str
    step: int | None
    before: float | None
    after: float | None
    """None if the function failed."""
    parts: dict[str, float] = {}
    error: str = ""

    @property
    def changed(self) -> bool:
        if self.before is None or self.after is None:
            return self.before is not self.after
        return not math.isclose(self.before, self.after, rel_tol=SAME, abs_tol=SAME)


class TaskTrial(msgspec.Struct, frozen=True):
    """The transcripts of one task, taken together. Means are over those that have both rewards."""

    task: str
    scored: int
    failed: int
    changed: int
    before: float | None
    after: float | None


class Trial(msgspec.Struct, frozen=True):
    function: str
    compared_with: str
    """`reward`, or the name of one of several."""
    tasks: tuple[TaskTrial, ...]
    transcripts: tuple[Tried, ...]
    """Those that changed first, by how much, then the others."""


def try_reward(function: str, run: Path, task: str = "", reward: str = "") -> Trial:
    """Score the stored transcripts of `run` with `function`; of one task, if named.

    The result is compared with the reward named `reward`, by default the whole reward of the trajectory.
    """
    if not (run / CONFIG).is_file():
        raise RequestError(f"{run} has no {CONFIG}; give the folder of a run")
    scorer = Scorer(function)
    stored = [each for each in read_transcripts(run / TRANSCRIPTS) if task in ("", each.task)]
    if not stored:
        of = f" of task {task!r}" if task else ""
        raise RequestError(
            f"{run} has no transcripts{of}; a run keeps them unless transcripts_mb is 0, from its first results on"
        )
    known = list(dict.fromkeys(name for each in stored for name in each.rewards))
    if reward and reward not in known:
        raise RequestError(f"no transcript has a reward {reward!r}; there are {', '.join(known) or 'none by name'}")
    with asyncio.Runner() as runner:
        tried = [each for part in _parts(scorer.kind, stored) for each in _score(scorer, part, reward, runner)]
    tried.sort(key=lambda each: (not each.changed, -_difference(each), each.trajectory))
    names = sorted({each.task for each in tried})
    return Trial(function, reward or "reward", tuple(_of_task(name, tried) for name in names), tuple(tried))


def _parts(kind: RewardKind, stored: Sequence[StoredTranscript]) -> Iterator[list[StoredTranscript]]:
    """What the function is called with, one call at a time. A group has its members that ended with a result."""
    if kind is RewardKind.TRAJECTORY:
        yield from ([each] for each in stored)
        return
    groups: dict[int, list[StoredTranscript]] = {}
    for each in stored:
        if each.outcome in TRAINABLE:
            groups.setdefault(each.group, []).append(each)
    for members in groups.values():
        yield sorted(members, key=_member)


def _member(stored: StoredTranscript) -> int:
    try:
        return stored.transcript().member
    except ValueError:
        return 0  # damaged: scoring the group says so


def _score(scorer: Scorer, members: Sequence[StoredTranscript], reward: str, runner: asyncio.Runner) -> Iterable[Tried]:
    error = ""
    values: Sequence[float | None] = [None] * len(members)
    parts: Sequence[dict[str, float]] = ()
    try:
        values, parts = scorer.score([each.transcript() for each in members], runner)
    except BadReward as bad:
        error = str(bad)
    except Exception as raised:  # noqa: BLE001 - the boundary of user code: its errors are shown
        error = f"{type(raised).__name__}: {raised}"
    for index, each in enumerate(members):
        before = each.rewards.get(reward) if reward else each.reward
        yield Tried(each.trajectory, each.task, each.step, before, values[index], parts[index] if parts else {}, error)


def _difference(tried: Tried) -> float:
    return math.inf if tried.before is None or tried.after is None else abs(tried.after - tried.before)


def _of_task(task: str, tried: Sequence[Tried]) -> TaskTrial:
    mine = [each for each in tried if each.task == task]
    both = [(each.before, each.after) for each in mine if each.before is not None and each.after is not None]
    return TaskTrial(
        task=task,
        scored=sum(each.after is not None for each in mine),
        failed=sum(each.after is None for each in mine),
        changed=sum(each.changed for each in mine),
        before=math.fsum(before for before, _ in both) / len(both) if both else None,
        after=math.fsum(after for _, after in both) / len(both) if both else None,
    )
