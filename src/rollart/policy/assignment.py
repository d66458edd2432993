"""Assignment of tasks to hardware classes: the one that minimises the predicted load (`types.affinity`).

The best class for each task alone would overload one of them, so all tasks are assigned together: exactly where there
are at most `EXACT` assignments, else by moves and swaps from the present one. Every moved task costs `MOVE_COST` of the
score, which suppresses moves with a negligible gain.

    >>> from rollart.types.affinity import ClassSize
    >>> classes = (ClassSize("H800", 2, 64), ClassSize("H20", 2, 64))
    >>> def cost(task, hardware, prefill_s, decode_s):
    ...     return WorkCost(task, hardware, prefill_s, decode_s, 0.0, 8.0)
    >>> costs = (cost("swe", "H800", 60, 40), cost("swe", "H20", 126, 38))
    >>> costs += (cost("math", "H800", 5, 90), cost("math", "H20", 11, 70))
    >>> figures = AffinityFigures(classes, costs)
    >>> chosen = best_assignment(figures, {}, {})
    >>> chosen
    {'swe': 'H800', 'math': 'H20'}
    >>> explain(figures, chosen, "swe")
    'swe → H800: 60 % of its time is prefill, which costs 2.1× on H20'
"""

import itertools
import math
from collections.abc import Iterator, Mapping

from rollart.types.affinity import AffinityFigures, ClassSize, WorkCost

EXACT = 4096
MOVE_COST = 0.01
Assignment = dict[str, str]


class LoadModel:
    """Loads of a set of figures, for any assignment of their tasks."""

    def __init__(self, figures: AffinityFigures) -> None:
        self._classes = {size.hardware: size for size in figures.classes}
        self._costs = {(cost.task, cost.hardware): cost for cost in figures.costs}
        self._pinned = [cost for cost in figures.pinned if cost.hardware in self._classes]

    def loads(self, assignment: Mapping[str, str]) -> dict[str, float]:
        """Load of every class."""
        here = self._here(assignment)
        return {name: self._load(size, here[name]) for name, size in self._classes.items()}

    def score(self, assignment: Mapping[str, str]) -> float:
        """What decisions minimise: the root mean square of the load over engines."""
        loads = self.loads(assignment)
        squares = math.fsum(size.engines * loads[name] ** 2 for name, size in self._classes.items())
        return math.sqrt(squares / sum(size.engines for size in self._classes.values()))

    def seconds(self, assignment: Mapping[str, str], task: str, hardware: str) -> tuple[float, float]:
        """Engine-seconds of a task's prefill and decoding on a class, in the batches that it would have there."""
        costs = self._here({**assignment, task: hardware})[hardware]
        cost = self._costs[task, hardware]
        return cost.prefill_s, cost.decode_s + cost.fixed_s / _batch(self._classes[hardware], costs)

    def _here(self, assignment: Mapping[str, str]) -> dict[str, list[WorkCost]]:
        here: dict[str, list[WorkCost]] = {name: [] for name in self._classes}
        for task, hardware in assignment.items():
            cost = self._costs.get((task, hardware))
            if cost is not None:
                here[hardware].append(cost)
        for cost in self._pinned:
            here[cost.hardware].append(cost)
        return here

    @staticmethod
    def _load(size: ClassSize, costs: list[WorkCost]) -> float:
        whole = math.fsum(cost.prefill_s + cost.decode_s for cost in costs)
        fixed = math.fsum(cost.fixed_s for cost in costs)
        return (whole + fixed / _batch(size, costs)) / size.engines


def _batch(size: ClassSize, costs: list[WorkCost]) -> float:
    """Requests in a decoding step of an engine."""
    return min(max(math.fsum(cost.in_flight for cost in costs) / size.engines, 1.0), float(size.slots))


def best_assignment(figures: AffinityFigures, present: Mapping[str, str], fixed: Mapping[str, str]) -> Assignment:
    """The best assignment of all tasks with costs; those of `fixed` stay. `present` has the classes to move from."""
    model = LoadModel(figures)
    options: dict[str, list[str]] = {}
    for cost in figures.costs:
        if cost.task not in fixed:
            options.setdefault(cost.task, []).append(cost.hardware)
    start = {**fixed, **{task: present.get(task, classes[0]) for task, classes in options.items()}}

    def price(assignment: Mapping[str, str]) -> float:
        moves = sum(present.get(task, hardware) != hardware for task, hardware in assignment.items())
        return model.score(assignment) * (1.0 + MOVE_COST * moves)

    if math.prod(len(classes) for classes in options.values()) <= EXACT:
        every = itertools.product(*options.values())
        found = min(({**fixed, **dict(zip(options, chosen, strict=True))} for chosen in every), key=price)
    else:
        found = start
        while (better := min(_neighbours(found, options), key=price)) and price(better) < price(found):
            found = better
    return {task: found[task] for task in dict.fromkeys(cost.task for cost in figures.costs) if task in found}


def _neighbours(assignment: Assignment, options: Mapping[str, list[str]]) -> Iterator[Assignment]:
    """Assignments that differ in one task, or by a swap of two."""
    for task, classes in options.items():
        for hardware in classes:
            yield {**assignment, task: hardware}
    for one, other in itertools.combinations(options, 2):
        if assignment[one] in options[other] and assignment[other] in options[one]:
            yield {**assignment, one: assignment[other], other: assignment[one]}


def explain(figures: AffinityFigures, assignment: Mapping[str, str], task: str) -> str:
    """Why a task is on its class, as a sentence."""
    chosen = assignment[task]
    model = LoadModel(figures)
    others = [cost.hardware for cost in figures.costs if cost.task == task and cost.hardware != chosen]
    if not others:
        return f"{task} → {chosen}: the only class with engines that is measured"
    here = model.seconds(assignment, task, chosen)
    there, other = min((model.seconds(assignment, task, name), name) for name in others)
    if sum(here) > sum(there):
        return f"{task} → {chosen}: costs {_times(sum(here), sum(there))} of {other}, which has more to do"
    part = int(there[1] - here[1] > there[0] - here[0])
    share = here[part] / sum(here) if sum(here) else 0.0
    return (
        f"{task} → {chosen}: {100 * share:.0f} % of its time is {('prefill', 'decoding')[part]}, "
        f"which costs {_times(there[part], here[part])} on {other}"
    )


def _times(cost: float, of: float) -> str:
    return f"{cost / of:.1f}×" if of > 0 else "more"
