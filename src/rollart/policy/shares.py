"""What the next batch is made of: the configured share of every task, or a recorded exception.

The wait for a batch starts when the trainer is free. A task that has not filled its share by its deadline either stops
the run or gives up the rest of its share for this batch: the tasks that did fill theirs fill in, in turn. The batch is
always whole. If no task can fill in, the run stops and says why: never a silent hang.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple


class ShareRule(NamedTuple):
    """A task's share, in groups per batch, and what happens when it is not filled in time."""

    groups: int
    deadline_s: float
    unfilled: Literal["redistribute", "stop"]


class Redistributed(NamedTuple):
    """Part of the batch changes hands."""

    missing: dict[str, int]
    filled_by: dict[str, int]
    cause: str


class Unfillable(NamedTuple):
    """The batch cannot be filled: the run has to stop."""

    cause: str


class ShareBook:
    """The composition of the batch that is claimed next."""

    def __init__(self, rules: Mapping[str, ShareRule]) -> None:
        self._rules = dict(rules)
        self._need = self.usual()
        self._since: float | None = None
        self._given_up: dict[str, None] = {}

    @property
    def need(self) -> Mapping[str, int]:
        """Groups of each task in the next batch."""
        return self._need

    def usual(self) -> dict[str, int]:
        return {task: rule.groups for task, rule in self._rules.items()}

    def missing(self, ready: Mapping[str, int]) -> dict[str, int]:
        """Groups that the next batch still waits for."""
        short = {task: need - ready.get(task, 0) for task, need in self._need.items()}
        return {task: count for task, count in short.items() if count > 0}

    def wait_started(self, now: float) -> None:
        """The trainer is free and waits for a batch."""
        self._since = now

    def claimed(self) -> None:
        """The batch is claimed; the next one has the usual shares again."""
        self._need = self.usual()
        self._since = None
        self._given_up = {}

    def next_wake(self) -> float | None:
        """When `check` has to be asked again."""
        if self._since is None:
            return None
        deadlines = [rule.deadline_s for task, rule in self._rules.items() if task not in self._given_up]
        return self._since + min(deadlines) if deadlines else None

    def check(self, ready: Mapping[str, int], now: float) -> Redistributed | Unfillable | None:
        """Act on the deadlines that have passed."""
        if self._since is None:
            return None
        short = self.missing(ready)
        waited = now - self._since
        late = [
            task
            for task, rule in self._rules.items()
            if task not in self._given_up and now >= self._since + rule.deadline_s
        ]
        for task in late:
            self._given_up[task] = None
        overdue = {task: short[task] for task in late if task in short}
        if not overdue:
            return None
        for task, count in overdue.items():
            if self._rules[task].unfilled == "stop":
                return Unfillable(f"task {task} is {count} groups short of its share after {waited:g} s")
        helpers = [task for task in self._rules if task not in short]
        if not helpers:
            names = ", ".join(f"{task} ({count} short)" for task, count in short.items())
            return Unfillable(f"no task fills its share after {waited:g} s: {names}")
        return self._hand_over(overdue, helpers, waited)

    def _hand_over(self, overdue: dict[str, int], helpers: list[str], waited: float) -> Redistributed:
        filled_by = dict.fromkeys(helpers, 0)
        for number in range(sum(overdue.values())):
            filled_by[helpers[number % len(helpers)]] += 1
        filled_by = {task: count for task, count in filled_by.items() if count}
        self._need = {task: need - overdue.get(task, 0) + filled_by.get(task, 0) for task, need in self._need.items()}
        return Redistributed(overdue, filled_by, f"share not filled after {waited:g} s")
