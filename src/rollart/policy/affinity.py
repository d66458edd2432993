"""Automatic hardware affinity: tasks with `hardware = "auto"` find their class by measurement.

Engines report, by task, the seconds that prompts and sampled tokens took under load (`affinity_costs`); tasks are
assigned so that the predicted load is least (`assignment`).

Invariants:

- Only automatic tasks are assigned, and only to classes that they can use and that have engines or had some less than
  `confirm_s` ago. A task without an assignment runs wherever there is least load.
- A task is assigned once its costs are known on all of its classes that have engines, if there are several. It moves
  later only if that lowers the score by `min_gain`, for `confirm_s` and a training step without interruption (within a
  step the mix of tasks varies), or if its class has had no engine for `confirm_s`.
- After its n-th move for a gain a task stays for at least `hold_s` · 2ⁿ⁻¹, at most 32 `hold_s`.
- Trajectories sent to a class only to measure it: per task at most `BURST` per class, plus the share `explore` of its
  trajectories. They are sent only while the class's estimate lacks evidence: new, or old.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollart.policy.affinity_costs import CostEstimates
from rollart.policy.assignment import Assignment, LoadModel, best_assignment, explain
from rollart.types.affinity import AffinityCause, AffinityFigures, AffinityRules, ClassSize, WorkCost
from rollart.types.messages import TaskWork

BURST = 4
MAX_HOLDS = 32
REPORTS = 3
"""Reports that have to confirm a gain."""


class Decision(NamedTuple):
    """See `types.journal.AffinityChanged`."""

    cause: AffinityCause
    assigned: Assignment
    before: Assignment
    why: dict[str, str]
    figures: AffinityFigures
    score: float
    score_before: float
    since: float


class _Class:
    __slots__ = ("engines", "lost_since", "slots")

    def __init__(self) -> None:
        self.engines = 0
        self.slots = 1
        self.lost_since = 0.0


class AffinityPolicy:
    """Decides the classes of automatic tasks; see the module. Call `tick` every `rules.tick_s`."""

    def __init__(self, rules: AffinityRules) -> None:
        self._rules = rules
        self._estimates = CostEstimates()
        self._classes: dict[str, _Class] = {}
        self._others: dict[str, None] = {}
        """Tasks with work that are not automatic."""
        self._assigned: Assignment = {}
        self._moves: dict[str, int] = {}
        self._held_until: dict[str, float] = {}
        self._credit = {task: float(BURST * len(classes)) for task, classes in rules.classes.items()}
        self._ready_since: float | None = None
        """Time since which some tasks can be assigned while others cannot."""
        self._gain_since: float | None = None
        self._gain_reports = 0
        self._gain_steps = 0
        self._steps = 0

    @property
    def assigned(self) -> Mapping[str, str]:
        return self._assigned

    # --- what happens -----------------------------------------------------------------------------------------------

    def engine_joined(self, hardware: str, slots: int) -> None:
        entry = self._classes.setdefault(hardware, _Class())
        entry.engines += 1
        entry.slots = slots

    def engine_left(self, hardware: str, now: float) -> None:
        entry = self._classes[hardware]
        entry.engines -= 1
        entry.lost_since = now

    def worked(self, hardware: str, work: Sequence[TaskWork], now: float) -> None:
        """An engine of the class reported its work."""
        for each in work:
            if each.task not in self._rules.classes:
                self._others[each.task] = None
        self._estimates.add(hardware, work, now)

    def step_trained(self, now: float) -> None:
        self._steps += 1
        self._estimates.step_trained(now)

    # --- exploration ------------------------------------------------------------------------------------------------

    def probe(self, task: str, now: float) -> str | None:
        """Class that a new trajectory should measure, or None. Report the placement with `placed`."""
        if self._credit.get(task, 0.0) < 1.0:
            return None
        here, best, most = self._assigned.get(task), None, 0.0
        present = self._present(task)
        for hardware in present if len(present) > 1 else ():
            lack = 0.0 if hardware == here else self._estimates.lacks(task, hardware, now)
            if lack > most:
                best, most = hardware, lack
        return best

    def placed(self, task: str, probed: str | None, now: float) -> None:
        """A trajectory was placed for the first time; `probed` is the class that it measures."""
        credit = self._credit.get(task)
        if credit is None:
            return
        most = float(BURST * len(self._rules.classes[task]))
        self._credit[task] = min(credit + self._rules.explore, most) - (probed is not None)
        if probed is not None:
            self._estimates.asked(task, probed, now)

    # --- decisions --------------------------------------------------------------------------------------------------

    def tick(self, in_flight: Mapping[tuple[str, str], int], now: float) -> Decision | None:
        """The next decision, if one is due. `in_flight` counts requests by task and class."""
        self._estimates.sample(in_flight)
        decision = self._lost(now) or self._measured(now) or self._better(now)
        if decision is not None:
            self._assigned = dict(decision.assigned)
        return decision

    def _lost(self, now: float) -> Decision | None:
        """Reassign tasks whose class has had no engine for `confirm_s`."""
        gone = {
            task: self._classes[hardware].lost_since
            for task, hardware in self._assigned.items()
            if not self._classes[hardware].engines
            and now - self._classes[hardware].lost_since >= self._rules.confirm_s
            and self._present(task)
        }
        if not gone:
            return None
        stay = {task: hardware for task, hardware in self._assigned.items() if task not in gone}
        figures = self._figures([*stay, *gone])
        after = best_assignment(figures, {}, stay) | stay
        why = {
            task: f"{task} → {after.get(task, 'least loaded class')}: {self._assigned[task]} has no engine"
            for task in gone
        }
        score = LoadModel(figures).score(after)
        return self._decided(AffinityCause.LOST, after, why, figures, (score, score), min(gone.values()))

    def _measured(self, now: float) -> Decision | None:
        """Assign tasks whose costs have become known."""
        waiting = [task for task in self._rules.classes if task not in self._assigned]
        ready = [task for task in waiting if 1 < len(self._present(task)) == len(self._measured_on(task))]
        if not ready:
            self._ready_since = None
            return None
        if self._ready_since is None:
            self._ready_since = now
        if len(ready) < len(waiting) and now - self._ready_since < self._rules.confirm_s:
            return None
        figures = self._figures([*self._assigned, *ready])
        after = best_assignment(figures, {}, self._assigned) | self._assigned
        why = {task: explain(figures, after, task) for task in ready}
        score, since = LoadModel(figures).score(after), self._ready_since
        self._ready_since = None
        return self._decided(AffinityCause.MEASURED, after, why, figures, (score, score), since)

    def _better(self, now: float) -> Decision | None:
        """Move tasks for which another assignment has a confirmed gain."""
        before = self._assigned
        free = [task for task in before if now >= self._held_until.get(task, now) and len(self._measured_on(task)) > 1]
        if not free or not all(self._classes[hardware].engines for hardware in before.values()):
            self._gain_since = None
            return None
        figures = self._figures(list(before))
        after = best_assignment(figures, before, {task: before[task] for task in before if task not in free})
        model = LoadModel(figures)
        score, score_before = model.score(after), model.score(before)
        if score > (1.0 - self._rules.min_gain) * score_before:
            self._gain_since = None
            return None
        if self._gain_since is None:
            self._gain_since, self._gain_reports, self._gain_steps = now, self._estimates.reports, self._steps
        if now - self._gain_since < self._rules.confirm_s or self._steps == self._gain_steps:
            return None
        if self._estimates.reports < self._gain_reports + REPORTS:
            return None
        moved = [task for task in after if after[task] != before[task]]
        for task in moved:
            self._moves[task] = self._moves.get(task, 0) + 1
            self._held_until[task] = now + self._rules.hold_s * min(2 ** (self._moves[task] - 1), MAX_HOLDS)
        since, self._gain_since = self._gain_since, None
        why = {task: explain(figures, after, task) for task in moved}
        return self._decided(AffinityCause.GAIN, after, why, figures, (score, score_before), since)

    def _decided(
        self,
        cause: AffinityCause,
        after: Assignment,
        why: dict[str, str],
        figures: AffinityFigures,
        scores: tuple[float, float],
        since: float,
    ) -> Decision:
        return Decision(cause, after, dict(self._assigned), why, figures, *scores, since)

    # --- figures ----------------------------------------------------------------------------------------------------

    def _present(self, task: str) -> list[str]:
        """Classes with engines that the task can use."""
        usable = self._rules.classes.get(task, ())
        return [name for name in usable if name in self._classes and self._classes[name].engines]

    def _measured_on(self, task: str) -> list[str]:
        """Those of them on which its cost is known."""
        return [name for name in self._present(task) if self._estimates.known(task, name)]

    def _figures(self, tasks: Sequence[str]) -> AffinityFigures:
        """Figures for an assignment of these tasks; all others are pinned to their present classes."""
        costs: list[WorkCost] = []
        pinned: list[WorkCost] = []
        for task in self._rules.classes:
            if task in tasks:
                costs += self._estimates.costs(task, self._measured_on(task))
            else:
                pinned += self._estimates.costs_as_is(task)
        for task in self._others:
            pinned += self._estimates.costs_as_is(task)
        sizes = [ClassSize(name, entry.engines, entry.slots) for name, entry in self._classes.items() if entry.engines]
        return AffinityFigures(tuple(sizes), tuple(costs), tuple(pinned))
