"""The fuzzer itself: worlds are functions of their seeds, run clean, replay anywhere, and shrink when they fail."""

import os
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from rollart.cli.fuzz import describe
from rollart.config.modes import Mode
from rollart.policy.staleness import StalenessBound
from rollart.sim.crashes import ALL_DEAD_WITHIN_S, CrashableJournal, run_world
from rollart.sim.faults import Fault
from rollart.sim.fuzz import PATIENT_S, World, make_world
from rollart.sim.lossy import LinkFaults
from rollart.sim.scenario import parse_scenario
from rollart.sim.shrink import shrink
from rollart.sim.verdict import MIN_STEPS, MIN_TRAJECTORIES, Verdict, check_seed
from rollart.types.failures import StopReason
from rollart.types.journal import JournalEvent, RunEnded, RunResumed, StallReported, WorkerDied
from rollart.types.messages import Role

SEEDS = (*range(25), 94, 100)
BAD_LINK = LinkFaults(seed=5, loss=0.1, double=0.1, delay_s=0.1, cut_s=5.0)


@cache
def verdict(seed: int) -> Verdict:
    return check_seed(seed)


def eventful(seed: int) -> World:
    """The world of a seed with a bad link and a controller that dies once, whatever it had of these."""
    drawn = make_world(seed)
    kill = Fault(15, "kill", "trainer/", on="Trained", skip=1)
    return World(seed, drawn.tables, (*drawn.faults, kill), BAD_LINK, (8.0,))


def first_fatal() -> World:
    return next(world for world in map(make_world, range(1000)) if world.fatal)


def is_congested(world: World) -> bool:
    sim = world.tables["sim"]
    slots = world.tables["reward_workers"] * sim["reward"]["slots"]
    return slots == 1 and all(task["reward_s"]["median"] >= 0.8 for task in sim["tasks"].values())


# --- worlds ---------------------------------------------------------------------------------------------------------


def test_a_world_is_a_function_of_its_seed() -> None:
    assert [make_world(seed) for seed in range(50)] == [make_world(seed) for seed in range(50)]
    assert make_world(1) != make_world(2)


def test_a_seed_may_be_run_in_any_mode() -> None:
    """Only the mode differs."""
    for mode in Mode:
        world = make_world(8, mode)
        assert world.tables["mode"] == mode.value
        assert world == make_world(8)._replace(tables=make_world(8).tables | {"mode": mode.value})


def test_every_world_is_a_valid_scenario() -> None:
    for seed in range(100):
        parse_scenario(make_world(seed).tables)


def test_worlds_differ_in_everything() -> None:
    """No feature of a world is so rare that a few hundred seeds miss it, and none is everywhere."""
    worlds = [make_world(seed) for seed in range(400)]
    assert Counter(world.tables["mode"] for world in worlds) == {mode.value: 80 for mode in Mode}
    for what, count in {
        "fatal": sum(world.fatal for world in worlds),
        "without a fault": sum(not world.faults for world in worlds),
        "a bad link": sum(world.link is not None for world in worlds),
        "a link that is cut": sum(world.link is not None and world.link.cut_s > 0 for world in worlds),
        "a controller that dies": sum(bool(world.controller_dies_at_s) for world in worlds),
        "a node that drains": sum(bool(world.drains) for world in worlds),
        "several tasks": sum(len(world.tables["tasks"]) > 1 for world in worlds),
        "evaluation": sum(world.tables["eval_every"] > 0 for world in worlds),
        "no staleness": sum(world.tables["alpha"] == 0 for world in worlds),
        "rolling updates": sum(world.tables["rolling_update"] for world in worlds),
        "dynamic sampling": sum(world.tables["algorithm"]["filter_zero_variance"] for world in worlds),
        "limited dynamic sampling": sum("filter_limit" in world.tables["algorithm"] for world in worlds),
        "congested rewards": sum(is_congested(world) for world in worlds),
        "advantages per turn": sum(world.tables["algorithm"]["advantage"] == "gigpo" for world in worlds),
    }.items():
        assert 0 < count < 400, what
    rows = {fault.row for world in worlds for fault in world.faults}
    rows_of_the_world = {11, 23, 24}
    assert rows | rows_of_the_world == set(range(1, 25)), "every row of the list is in some world"


def test_one_engine_is_always_spared() -> None:
    """What the design promises it promises while one engine is healthy."""
    for seed in range(400):
        world = make_world(seed)
        spared = f"engine/{next(iter(world.tables['pools']))}/0"
        deadly = ("kill", "freeze", "hang", "absent", "corrupt")
        for fault in () if world.fatal else world.faults:
            hits = fault.target == spared or (fault.target.endswith("/") and spared.startswith(fault.target))
            assert not (hits and fault.kind in deadly), (seed, fault)


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_runs_clean(seed: int) -> None:
    assert verdict(seed).violations == []
    assert verdict(seed).steps >= MIN_STEPS
    assert verdict(seed).trajectories >= MIN_TRAJECTORIES


def test_every_mode_occurs_and_most_faults_strike() -> None:
    verdicts = [verdict(seed) for seed in SEEDS]
    assert {found.mode for found in verdicts} == {mode.value for mode in Mode}
    assert sum(bool(found.injected) for found in verdicts) > len(SEEDS) / 2


def test_a_run_goes_through_the_deaths_of_its_controller() -> None:
    done = run_world(eventful(4)._replace(controller_dies_at_s=(5.0, 4.0)))
    assert done.violations == []
    assert done.injected[23] == 2
    assert sum(isinstance(event, RunResumed) for event in done.events) == 2
    assert [type(event) for event in done.events].count(RunEnded) == 1


def test_the_same_seed_gives_the_same_journal_in_every_process() -> None:
    seeds = (1, 6, 19)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_fuzz import eventful, run_world\n"
        f"for seed in {seeds}:\n"
        "    done = run_world(eventful(seed))\n"
        "    print(seed, done.digest, done.injected[23], done.injected[24] > 0, len(done.violations))\n"
    )
    outs = []
    for hash_seed in ("1", "4242"):
        command = [sys.executable, "-c", script, os.path.dirname(__file__)]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr
        outs.append(done.stdout)
    assert outs[0] == outs[1]
    lines = [line.split() for line in outs[0].splitlines()]
    assert [int(line[0]) for line in lines] == list(seeds)
    assert [line[2:] for line in lines] == [["1", "True", "0"]] * len(seeds), "each died once, over a bad link, clean"


def test_a_world_without_engines_ends_in_time_and_says_why() -> None:
    done = run_world(first_fatal())
    assert done.violations == []
    ended = done.events[-1]
    assert isinstance(ended, RunEnded)
    assert ended.stop in (StopReason.NO_ENGINE, StopReason.WORKER_LOST)
    died = [event for event in done.events if isinstance(event, WorkerDied)]
    last = [event.at for event in died if event.worker.startswith(Role.ENGINE.value)][-1]
    assert ended.at - last <= ALL_DEAD_WITHIN_S == 60.0


def test_a_run_that_should_have_failed_is_a_violation() -> None:
    """A world without engines whose fault never strikes ends well, which is right; one that strikes must not."""
    world = first_fatal()
    harmless = world._replace(faults=tuple(fault._replace(skip=10**6) for fault in world.faults[:1]))
    done = run_world(harmless)
    assert done.violations == []
    survivable = World(world.seed, world.tables, tuple(fault._replace(row=2) for fault in world.faults[:1]))
    survivable = survivable._replace(faults=(*survivable.faults, world.faults[1]._replace(row=2, once_struck=2)))
    rules = {violation.rule for violation in run_world(survivable).violations}
    assert 8 in rules, "the same deaths in a world that is to survive break its liveness"


# --- what a crash leaves --------------------------------------------------------------------------------------------


def stall(at: float) -> JournalEvent:
    return StallReported(at, ())


def test_a_crash_keeps_what_was_flushed_and_a_part_of_the_rest() -> None:
    def drive(coroutine: "object") -> None:
        with pytest.raises(StopIteration):
            coroutine.send(None)  # type: ignore[attr-defined]

    journal = CrashableJournal([stall(0.0)])
    journal.append(stall(1.0))
    drive(journal.flush())
    for at in (2.0, 3.0, 4.0):
        journal.append(stall(at))
    journal.crash()
    journal.append(stall(5.0))
    drive(journal.close())
    kept = {share: [event.at for event in journal.survived(share)] for share in (0.0, 0.3, 0.6, 0.99)}
    assert kept == {
        0.0: [0.0, 1.0],
        0.3: [0.0, 1.0, 2.0],
        0.6: [0.0, 1.0, 2.0, 3.0],
        0.99: [0.0, 1.0, 2.0, 3.0, 4.0],
    }


# --- shrinking ------------------------------------------------------------------------------------------------------


def breaks_staleness(world: World) -> bool:
    return any(violation.rule == 2 for violation in run_world(world).violations)


def size(world: World) -> int:
    tables = world.tables
    given = [pool["engines"] for pool in tables["pools"].values()]
    engines = sum(number["max"] if isinstance(number, dict) else number for number in given)
    return (
        len(world.faults)
        + len(world.controller_dies_at_s)
        + (world.link is not None)
        + tables["steps"]
        + len(tables["tasks"])
        + engines
    )


def test_a_failing_world_shrinks_and_still_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StalenessBound, "violated", lambda *_: False)
    seeds = (seed for seed in range(500) if breaks_staleness(make_world(seed, Mode.ROLLART)))
    failing = make_world(next(seeds), Mode.ROLLART)
    failing = failing._replace(faults=(*failing.faults, Fault(13, "double", "reward/", on="Scored")))
    before = describe(failing)
    tried = 0

    def fails(world: World) -> bool:
        nonlocal tried
        tried += 1
        return breaks_staleness(world)

    small = shrink(failing, fails, attempts=40)
    assert tried <= 40
    assert breaks_staleness(small)
    assert size(small) < size(failing)
    assert parse_scenario(small.tables), "what is left is a world like any other"
    assert describe(failing) == before, "the world that was given is as it was"


def test_a_world_shrinks_to_what_matters() -> None:
    world = eventful(4)
    needed = world.faults[-1]
    small = shrink(world, lambda candidate: needed in candidate.faults)
    assert small.faults == (needed,)
    assert small.link is None
    assert small.controller_dies_at_s == ()
    tables = small.tables
    assert (tables["steps"], tables["alpha"], tables["eval_every"]) == (1, 0, 0)
    assert len(tables["tasks"]) == len(tables["sim"]["tasks"]) == 1
    assert tables["batch"]["trajectories"] == tables["batch"]["group_size"]
    parse_scenario(tables)


def three_tasks_with_a_hasty_one() -> World:
    """Shares of 3, 3 and 2, which only some batches divide into whole groups."""
    wanted = (world for world in map(make_world, range(2000)) if len(world.tables["tasks"]) == 3 and not world.fatal)
    world = next(wanted)
    for task, share in zip(world.tables["tasks"].values(), (3, 3, 2), strict=True):
        task["share"] = share
    world.tables["tasks"]["task1"]["share_deadline_s"] = 2.0
    world.tables["batch"]["trajectories"] = 16 * world.tables["batch"]["group_size"]
    return world


def test_shrinking_tries_possible_worlds_only() -> None:
    """It once died on the first smaller world that the config refuses."""
    tried: list[World] = []

    def fails(world: World) -> bool:
        parse_scenario(world.tables)
        tried.append(world)
        return False

    world = three_tasks_with_a_hasty_one()
    assert shrink(world, fails) == world
    assert any(len(world.tables["tasks"]) == 2 for world in tried)
    assert any(task["share"] == 1 for world in tried for task in world.tables["tasks"].values())


def test_shrinking_leaves_a_task_that_has_time() -> None:
    """A world whose only task is hasty fails by itself, whatever the bug was."""
    small = shrink(three_tasks_with_a_hasty_one(), lambda world: "task1" in world.tables["tasks"])
    (left,) = small.tables["tasks"].values()
    assert left["share_deadline_s"] == PATIENT_S


def test_what_is_left_out_costs_one_attempt_each() -> None:
    """A change that helps does not start the search again."""
    tried = 0

    def fails(_: World) -> bool:
        nonlocal tried
        tried += 1
        return True

    world = three_tasks_with_a_hasty_one()
    small = shrink(world, fails)
    assert len(small.tables["tasks"]) == small.tables["steps"] == 1
    assert tried < 30


def test_a_world_that_cannot_be_smaller_stays() -> None:
    world = make_world(3)
    assert shrink(world, lambda _candidate: False) == world


def test_no_world_has_a_disk_that_stays_full() -> None:
    """A run stops after three saves in a row have failed, and rightly so (found by seed 3002044)."""
    full = [fault for fault in make_world(3_002_044).faults if fault.kind == "full_disk"]
    assert len(full) == 2
