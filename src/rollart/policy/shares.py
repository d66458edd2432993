"""Composition of the next batch: the configured share of every task, or a recorded exception.

The wait for a batch starts when the trainer is free. A task that has not filled its share by its deadline either stops
the run or gives up the rest of its share for this batch; the tasks that filled theirs fill in, in turn. Batches are
always complete. If no task can fill in, the run stops and reports the cause instead of hanging silently.

Dynamic sampling rejects groups without a learning signal, so a nearly solved task would never fill its share. `refuse`
decides when enough groups were rejected for one batch.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple


class ShareRule(NamedTuple):
    """A task's share, in groups per batch, and what to do if it is not filled in time."""

    groups: int
    deadline_s: float
    unfilled: Literal["redistribute", "stop"]


class Redistributed(NamedTuple):
    """Part of the batch moves from some tasks to others."""

    missing: dict[str, int]
    filled_by: dict[str, int]
    cause: str


class Unfillable(NamedTuple):
    """The batch cannot be filled: the run must stop."""

    cause: str


class ShareBook:
    """Composition of the next batch to be claimed."""

    def __init__(self, rules: Mapping[str, ShareRule], refusals_per_group: float | None = None) -> None:
        self._rules = dict(rules)
        self._refusals_per_group = refusals_per_group
        self._refused = dict.fromkeys(rules, 0)
        self._need = self.usual()
        self._since: float | None = None
        self._deadlines: dict[str, float] = {}
        self._given_up: dict[str, None] = {}
        self._checked_at = -math.inf

    @property
    def need(self) -> Mapping[str, int]:
        """Groups of each task in the next batch."""
        return self._need

    def usual(self) -> dict[str, int]:
        return {task: rule.groups for task, rule in self._rules.items()}

    def missing(self, ready: Mapping[str, int]) -> dict[str, int]:
        """Groups that the next batch still lacks, per task."""
        short = {task: need - ready.get(task, 0) for task, need in self._need.items()}
        return {task: count for task, count in short.items() if count > 0}

    def wait_started(self, now: float) -> None:
        """Start the clock: the trainer is free and waits for a batch."""
        self._since = now
        self._deadlines = {task: now + rule.deadline_s for task, rule in self._rules.items()}
        self._checked_at = -math.inf

    def claimed(self) -> None:
        """The batch was claimed; restore the configured shares for the next one."""
        self._need = self.usual()
        self._since = None
        self._deadlines = {}
        self._given_up = {}
        self._refused = dict.fromkeys(self._rules, 0)

    def refuse(self, task: str) -> bool:
        """Whether a group without signal may be rejected; if so, counts the rejection."""
        limit = self._refusals_per_group
        if limit is not None and self._refused[task] >= limit * self._rules[task].groups:
            return False
        self._refused[task] += 1
        return True

    def next_wake(self) -> float | None:
        """When to call `check` again if nothing becomes ready before."""
        return min((at for at in self._deadlines.values() if at > self._checked_at), default=None)

    def check(self, ready: Mapping[str, int], now: float) -> Redistributed | Unfillable | None:
        """Act on the deadlines that have passed. Call at every change and at `next_wake`."""
        if self._since is None:
            return None
        self._checked_at = now
        short = self.missing(ready)
        overdue = {task: count for task, count in short.items() if now >= self._deadlines[task]}
        if not overdue:
            return None
        waited = now - self._since
        for task, count in overdue.items():
            if self._rules[task].unfilled == "stop":
                return Unfillable(f"task {task} is {count} groups short of its share after {waited:g} s")
        helpers = [task for task in self._rules if task not in short and task not in self._given_up]
        if helpers:
            return self._hand_over(overdue, helpers, now, waited)
        if len(overdue) < len(short):
            # A task is short but still has time: once it has filled its share it can fill in.
            return None
        names = ", ".join(f"{task} ({count} short)" for task, count in short.items())
        return Unfillable(f"no task fills its share after {waited:g} s: {names}")

    def _hand_over(self, overdue: dict[str, int], helpers: list[str], now: float, waited: float) -> Redistributed:
        """Restart the clock of the tasks that fill in; tasks that gave up do not fill in for others."""
        filled_by = dict.fromkeys(helpers, 0)
        for number in range(sum(overdue.values())):
            filled_by[helpers[number % len(helpers)]] += 1
        filled_by = {task: count for task, count in filled_by.items() if count}
        self._need = {task: need - overdue.get(task, 0) + filled_by.get(task, 0) for task, need in self._need.items()}
        self._given_up.update(dict.fromkeys(overdue))
        for task in filled_by:
            self._deadlines[task] = now + self._rules[task].deadline_s
        return Redistributed(overdue, filled_by, f"share not filled after {waited:g} s")
