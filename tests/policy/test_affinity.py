"""Automatic affinity: estimates from reports, assignments from estimates, decisions that neither flap nor starve."""

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.policy.affinity import BURST, AffinityPolicy, Decision
from rollart.policy.affinity_costs import ENOUGH, FRESH_S, MIX_TURNS, CostEstimates
from rollart.policy.assignment import EXACT, LoadModel, best_assignment, explain
from rollart.types.affinity import AffinityCause, AffinityFigures, AffinityRules, ClassSize, WorkCost
from rollart.types.messages import TaskWork

TASKS = ("swe", "math")
CLASSES = ("H800", "H20")
PROMPT, ANSWER = 100, 50
"""Tokens of a turn of a report."""


def rules(declared: Mapping[str, str] = {}, **changes: float) -> AffinityRules:
    values = {"explore": 0.05, "min_gain": 0.1, "confirm_s": 20.0, "hold_s": 60.0, "tick_s": 5.0} | changes
    return AffinityRules(
        classes={task: CLASSES for task in TASKS if task not in declared},
        declared=dict(declared),
        pools={name: name for name in CLASSES},
        **values,
    )


class Cluster:
    """Engines with given speeds, which report five turns of every task that runs on them at every tick."""

    def __init__(self, made: AffinityRules | None = None, engines: Sequence[str] = CLASSES) -> None:
        self.rules = made or rules()
        self.policy = AffinityPolicy(self.rules)
        self.now = 0.0
        self.batch = 10.0
        self.speeds = {"H800": (1.0, 3.0), "H20": (3.0, 1.0)}
        """Relative seconds of prefill and decoding."""
        self.weights = {"swe": (8.0, 1.0), "math": (1.0, 8.0)}
        """Relative work of a turn."""
        self.silent: set[str] = set()
        self.decisions: list[Decision] = []
        self.engines = dict.fromkeys(CLASSES, 0)
        for hardware in engines:
            self.join(hardware)

    def join(self, hardware: str) -> None:
        self.engines[hardware] += 1
        self.policy.engine_joined(hardware, 64)

    def leave(self, hardware: str) -> None:
        self.engines[hardware] -= 1
        self.policy.engine_left(hardware, self.now)

    def where(self, task: str) -> list[str]:
        """Classes that run a task now."""
        present = [hardware for hardware in CLASSES if self.engines[hardware]]
        chosen = self.rules.declared.get(task, self.policy.assigned.get(task))
        return [chosen] if chosen in present else present

    def report(self, task: str, hardware: str, turns: int = 5) -> TaskWork:
        prefill, decode = (w * s for w, s in zip(self.weights[task], self.speeds[hardware], strict=True))
        tokens = turns * ANSWER
        step_s = 0.5 + 0.05 * self.batch
        return TaskWork(
            task, turns, turns * PROMPT, turns * prefill, tokens, decode * tokens * step_s / self.batch,
            tokens / self.batch,
        )  # fmt: skip

    def tick(self, *, step: bool = True) -> Decision | None:
        self.now += self.rules.tick_s
        for hardware in CLASSES:
            work = [self.report(task, hardware) for task in TASKS if hardware in self.where(task)]
            if self.engines[hardware] and work and hardware not in self.silent:
                self.policy.worked(hardware, work, self.now)
        for task in TASKS:
            for _ in range(5):
                probed = self.policy.probe(task, self.now)
                self.policy.placed(task, probed, self.now)
                if probed is not None and probed not in self.silent:
                    self.policy.worked(probed, [self.report(task, probed, turns=2)], self.now)
        if step:
            self.policy.step_trained(self.now)
        in_flight = {(task, hardware): 10 for task in TASKS for hardware in self.where(task)}
        decision = self.policy.tick(in_flight, self.now)
        if decision is not None:
            self.decisions.append(decision)
        return decision

    def run(self, seconds: float, *, step: bool = True) -> list[Decision]:
        """Tick for a while; the decisions of that time."""
        before = len(self.decisions)
        for _ in range(round(seconds / self.rules.tick_s)):
            self.tick(step=step)
        return self.decisions[before:]


def settled(cluster: Cluster | None = None) -> Cluster:
    """A cluster whose tasks have found their classes, long ago."""
    cluster = cluster or Cluster()
    cluster.run(300.0)
    assert dict(cluster.policy.assigned) == {"swe": "H800", "math": "H20"}
    cluster.decisions.clear()
    return cluster


# --- estimates ------------------------------------------------------------------------------------------------------


def test_costs_are_split_into_a_part_per_step_and_a_part_per_token() -> None:
    estimates = CostEstimates()
    for now, batch in enumerate((1, 2, 4, 8, 16, 32, 64)):
        seconds = 100 * (0.008 + 0.0002 * batch)
        work = TaskWork("math", 1, 100, 2.0, 100 * batch, seconds, 100.0)
        estimates.add("H20", [work], float(now))
    (cost,) = estimates.costs("math", ["H20"])
    assert cost.decode_s / cost.fixed_s == pytest.approx(0.0002 / 0.008, rel=0.05)
    assert cost.prefill_s == pytest.approx(2.0 * MIX_TURNS)


def test_an_idle_class_is_not_taken_for_a_slow_one() -> None:
    """The same engines; on one of them a single request pays for every step."""
    estimates = CostEstimates()
    for now in range(20):
        for hardware, batch in (("busy", 10 + now % 10), ("idle", 1)):
            seconds = 10 * (0.008 + 0.0002 * batch)
            estimates.add(hardware, [TaskWork("math", 1, 100, 1.0, 10 * batch, seconds, 10.0)], float(now))
            estimates.sample({("math", hardware): batch})
    busy, idle = estimates.costs("math", ["busy", "idle"])
    assert 7.0 < 1.1 / 0.12 * (0.0082 / 0.0084)  # how much slower a token is there
    sizes = (ClassSize("busy", 1, 64), ClassSize("idle", 1, 64))
    loads = [
        LoadModel(AffinityFigures(sizes, (busy, idle))).loads({"math": hardware})[hardware]
        for hardware in ("busy", "idle")
    ]
    assert loads[1] == pytest.approx(loads[0], rel=0.35)


def test_a_changed_speed_shows_within_minutes() -> None:
    estimates = CostEstimates()
    for now in range(0, 600, 5):
        slow = 3.0 if now >= 300 else 1.0
        estimates.add("H20", [TaskWork("math", 1, 100, slow, 50, slow, 5.0)], float(now))
        (cost,) = estimates.costs("math", ["H20"])
        if now < 300:
            assert cost.prefill_s == pytest.approx(MIX_TURNS)
    assert cost.prefill_s == pytest.approx(3 * MIX_TURNS, rel=0.02)


def test_breaks_between_batches_do_not_count_as_few_requests() -> None:
    estimates = CostEstimates()
    for count in (40, 0, 0, 0, 40, 2, 0, 0):
        estimates.sample({("math", "H20"): count} if count else {})
    (cost,) = estimates.costs("math", ["H20"])
    assert cost.in_flight == pytest.approx(39.07, abs=0.01)


# --- assignments ----------------------------------------------------------------------------------------------------

seconds = st.floats(0.0, 100.0)


@st.composite
def some_figures(draw: st.DrawFn) -> AffinityFigures:
    names = [f"class{index}" for index in range(draw(st.integers(1, 3)))]
    sizes = [ClassSize(name, draw(st.integers(1, 5)), draw(st.integers(1, 64))) for name in names]
    costs = [
        WorkCost(f"task{task}", name, draw(seconds), draw(seconds), draw(seconds), draw(st.floats(0.0, 50.0)))
        for task in range(draw(st.integers(1, 4)))
        for name in names
    ]
    pinned = [WorkCost("other", draw(st.sampled_from(names)), draw(seconds), 1.0, 1.0, 3.0)] * draw(st.integers(0, 1))
    return AffinityFigures(tuple(sizes), tuple(costs), tuple(pinned))


@given(some_figures())
def test_the_best_assignment_is_the_best_of_all(figures: AffinityFigures) -> None:
    tasks = list(dict.fromkeys(cost.task for cost in figures.costs))
    names = [size.hardware for size in figures.classes]
    score = LoadModel(figures).score
    best = min(score(dict(zip(tasks, each, strict=True))) for each in itertools.product(names, repeat=len(tasks)))
    found = best_assignment(figures, {}, {})
    assert list(found) == tasks
    # Without a present assignment every task counts as moved, so the cost of moves is the same for all.
    assert score(found) == pytest.approx(best)


@given(some_figures())
def test_fixed_tasks_stay_and_nothing_moves_for_next_to_nothing(figures: AffinityFigures) -> None:
    tasks = list(dict.fromkeys(cost.task for cost in figures.costs))
    present = dict.fromkeys(tasks, figures.classes[-1].hardware)
    fixed = {tasks[0]: present[tasks[0]]}
    found = best_assignment(figures, present, fixed)
    assert found[tasks[0]] == present[tasks[0]]
    score = LoadModel(figures).score
    assert score(found) <= score(present) + 1e-9
    if found != present:
        assert score(found) < score(present)


def test_many_tasks_are_assigned_by_moves_and_swaps() -> None:
    """Two kinds of tasks that each fit one of two classes, too many for all assignments to be tried."""
    names = [f"task{index:02}" for index in range(14)]
    assert 2 ** len(names) > EXACT
    costs = []
    for index, name in enumerate(names):
        for hardware in CLASSES:
            slow = 3.0 if (index % 2 == 0) == (hardware == "H20") else 1.0
            costs.append(WorkCost(name, hardware, slow, slow, 0.0, 4.0))
    figures = AffinityFigures((ClassSize("H800", 2, 64), ClassSize("H20", 2, 64)), tuple(costs))
    found = best_assignment(figures, {}, {})
    assert found == {name: CLASSES[index % 2] for index, name in enumerate(names)}


def test_the_best_class_of_every_task_alone_would_overload_it() -> None:
    """Both tasks are cheaper on the class with fewer engines."""
    sizes = (ClassSize("H800", 1, 64), ClassSize("H20", 1, 64))
    costs = [
        WorkCost(task, hardware, s, 0.0, 0.0, 1.0) for task in TASKS for hardware, s in (("H800", 10), ("H20", 12))
    ]
    found = best_assignment(AffinityFigures(sizes, tuple(costs)), {}, {})
    assert sorted(found.values()) == ["H20", "H800"]
    task = next(name for name, hardware in found.items() if hardware == "H20")
    assert explain(AffinityFigures(sizes, tuple(costs)), found, task) == (
        f"{task} → H20: costs 1.2× of H800, which has more to do"
    )


# --- the first assignment -------------------------------------------------------------------------------------------


def test_tasks_find_the_class_where_they_cost_least() -> None:
    cluster = Cluster()
    (decision,) = cluster.run(60.0)
    assert decision.cause is AffinityCause.MEASURED
    assert decision.assigned == {"swe": "H800", "math": "H20"}
    assert decision.before == {}
    assert decision.why["swe"].startswith("swe → H800: ")
    assert "of its time is prefill, which costs 3.0× on H20" in decision.why["swe"]
    assert "of its time is decoding, which costs " in decision.why["math"]


def test_nothing_is_decided_without_a_choice() -> None:
    cluster = Cluster(engines=["H800"])
    assert cluster.run(300.0) == []
    cluster.join("H20")
    assert [decision.cause for decision in cluster.run(60.0)] == [AffinityCause.MEASURED]


def test_engines_that_do_not_measure_leave_tasks_where_there_is_least_load() -> None:
    cluster = Cluster()
    cluster.silent = {"H20"}
    assert cluster.run(600.0) == []
    assert cluster.policy.assigned == {}


def test_a_declared_class_is_load_and_never_a_decision() -> None:
    cluster = Cluster(rules(declared={"math": "H800"}))
    (decision,) = cluster.run(60.0)
    assert list(decision.assigned) == ["swe"]
    assert {(cost.task, cost.hardware) for cost in decision.figures.pinned} == {("math", "H800")}


def test_a_task_that_is_not_measured_yet_holds_up_the_others_only_for_a_while() -> None:
    cluster = Cluster(rules())
    for _ in range(10):
        cluster.now += 5.0
        for hardware in CLASSES:
            cluster.policy.worked(hardware, [cluster.report("swe", hardware)], cluster.now)
        decision = cluster.policy.tick({}, cluster.now)
        assert (decision is not None) == (cluster.now == 25.0), "20 s after the first report"


# --- moves ----------------------------------------------------------------------------------------------------------


def swap_speeds(cluster: Cluster) -> None:
    cluster.speeds = {"H800": (3.0, 1.0), "H20": (1.0, 3.0)}


def test_classes_that_change_places_are_noticed() -> None:
    cluster = settled()
    swap_speeds(cluster)
    cluster.run(1200.0)
    assert dict(cluster.policy.assigned) == {"swe": "H20", "math": "H800"}
    assert {decision.cause for decision in cluster.decisions} == {AffinityCause.GAIN}
    assert len(cluster.decisions) <= 3


def test_nothing_moves_while_nothing_changes() -> None:
    cluster = settled()
    assert cluster.run(10_000.0) == []


def test_a_gain_has_to_last_and_to_span_a_step() -> None:
    cluster = settled()
    cluster.speeds["H800"] = (20.0, 20.0)
    decisions = cluster.run(120.0, step=False)
    assert decisions == [], "no batch was trained meanwhile, so the mix of tasks may be that of a part of one"
    decision = cluster.tick()
    assert decision is not None
    assert decision.score <= 0.9 * decision.score_before
    assert cluster.now - decision.since >= cluster.rules.confirm_s


def test_a_task_that_moved_stays_twice_as_long_each_time() -> None:
    cluster = settled(Cluster(rules(confirm_s=5.0)))
    moved = []
    for _ in range(400):
        here = cluster.policy.assigned["swe"]
        cluster.speeds[here] = (30.0, 30.0)
        cluster.speeds[CLASSES[1 - CLASSES.index(here)]] = (1.0, 1.0)
        for hardware in CLASSES:  # as if trajectories kept measuring both classes
            cluster.policy.worked(hardware, [cluster.report(task, hardware) for task in TASKS], cluster.now)
        decision = cluster.tick()
        if decision is not None and "swe" in decision.why:
            moved.append(cluster.now)
    gaps = [after - before for before, after in itertools.pairwise(moved)]
    assert len(gaps) >= 4
    assert all(gap >= 60.0 * 2.0**number for number, gap in enumerate(gaps))


def test_a_class_without_engines_is_left_and_comes_back_into_use() -> None:
    cluster = settled(Cluster(rules(min_gain=0.05)))
    cluster.leave("H800")
    lost_at = cluster.now
    (decision,) = cluster.run(30.0)
    assert decision.cause is AffinityCause.LOST
    assert decision.assigned == {"swe": "H20", "math": "H20"}
    assert decision.since == lost_at
    assert decision.why == {"swe": "swe → H20: H800 has no engine"}
    cluster.join("H800")
    cluster.run(600.0)
    assert cluster.policy.assigned["swe"] == "H800"
    assert cluster.decisions[-1].cause is AffinityCause.GAIN


def test_an_engine_that_is_back_at_once_moves_nothing() -> None:
    cluster = settled()
    cluster.leave("H800")
    cluster.run(15.0)
    cluster.join("H800")
    assert cluster.run(300.0) == []


def test_the_last_class_is_not_left() -> None:
    cluster = settled()
    cluster.leave("H800")
    cluster.leave("H20")
    assert cluster.run(300.0) == []
    assert dict(cluster.policy.assigned) == {"swe": "H800", "math": "H20"}


# --- exploration ----------------------------------------------------------------------------------------------------


def probes(cluster: Cluster, task: str, trajectories: int, every_s: float = 0.0) -> list[str]:
    """Start trajectories; the classes that some of them measure."""
    found = []
    for _ in range(trajectories):
        cluster.now += every_s
        if every_s:
            cluster.policy.step_trained(cluster.now)
        probed = cluster.policy.probe(task, cluster.now)
        cluster.policy.placed(task, probed, cluster.now)
        if probed is not None:
            found.append(probed)
    return found


def test_at_first_every_class_gets_a_few_trajectories() -> None:
    cluster = Cluster()
    assert sorted(probes(cluster, "swe", 100)) == ["H20"] * int(ENOUGH) + ["H800"] * int(ENOUGH)


def test_a_class_is_measured_again_when_its_estimate_is_old_but_never_too_often() -> None:
    cluster = Cluster()
    cluster.run(60.0)
    assert probes(cluster, "swe", 20) == [], "what was measured in the first minute is fresh"
    cluster.now += 4 * FRESH_S
    found = probes(cluster, "swe", 10_000, every_s=60.0)
    assert set(found) == {"H20"}
    assert 50 < len(found) <= BURST * len(CLASSES) + 0.05 * 10_080


def test_a_declared_task_measures_nothing() -> None:
    cluster = Cluster(rules(declared={"math": "H20"}))
    assert probes(cluster, "math", 100) == []


def test_there_is_nothing_to_explore_with_one_class() -> None:
    assert probes(Cluster(engines=["H800"]), "swe", 100) == []


# --- whatever happens -----------------------------------------------------------------------------------------------

actions = st.one_of(
    st.tuples(st.just("join"), st.sampled_from(CLASSES)),
    st.tuples(st.just("leave"), st.sampled_from(CLASSES)),
    st.tuples(st.just("speed"), st.sampled_from(CLASSES), st.floats(1.0, 20.0), st.floats(1.0, 20.0)),
    st.tuples(st.just("run"), st.integers(1, 20), st.booleans()),
    st.tuples(st.just("start"), st.sampled_from(TASKS), st.integers(1, 30)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(actions, max_size=40))
def test_the_rules_hold_whatever_happens(script: list[tuple[object, ...]]) -> None:
    cluster = Cluster(rules(confirm_s=10.0, hold_s=30.0))
    moves: dict[str, list[float]] = {task: [] for task in TASKS}
    lost_at: dict[str, float] = {}
    started, spent = dict.fromkeys(TASKS, 0), dict.fromkeys(TASKS, 0)
    for action in script:
        match action:
            case ("join", str(hardware)):
                cluster.join(hardware)
                lost_at.pop(hardware, None)
            case ("leave", str(hardware)) if cluster.engines[hardware]:
                cluster.leave(hardware)
                if not cluster.engines[hardware]:
                    lost_at[hardware] = cluster.now
            case ("speed", str(hardware), float(prefill), float(decode)):
                cluster.speeds[hardware] = (prefill, decode)
            case ("start", str(task), int(count)):
                started[task] += count
                spent[task] += len(probes(cluster, task, count))
                assert spent[task] <= BURST * len(CLASSES) + cluster.rules.explore * started[task] + 1e-9
            case ("run", int(ticks), bool(step)):
                for _ in range(ticks):
                    decision = cluster.tick(step=step)
                    _check(cluster, decision, moves)
                    for task, hardware in cluster.policy.assigned.items():
                        others = any(cluster.engines[name] for name in CLASSES)
                        overdue = cluster.now - lost_at.get(hardware, cluster.now) > cluster.rules.confirm_s + 60.0
                        assert not (overdue and others and not cluster.engines[hardware] and task), (
                            "a task without pool"
                        )


def _check(cluster: Cluster, decision: Decision | None, moves: dict[str, list[float]]) -> None:
    if decision is None:
        return
    assert dict(cluster.policy.assigned) == decision.assigned
    assert set(decision.assigned.values()) <= set(CLASSES)
    assert LoadModel(decision.figures).score(decision.assigned) == decision.score
    changed = {t for t in TASKS if decision.before.get(t) != decision.assigned.get(t)}
    assert changed == set(decision.why)
    if decision.cause is AffinityCause.GAIN:
        assert decision.score <= (1 - cluster.rules.min_gain) * decision.score_before
        for task in changed:
            if moves[task]:
                hold_s = cluster.rules.hold_s * min(2 ** (len(moves[task]) - 1), 32)
                assert cluster.now - moves[task][-1] >= hold_s
            moves[task].append(cluster.now)
