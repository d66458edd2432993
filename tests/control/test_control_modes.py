"""The five modes, their timelines, and what an update does to what is in flight."""

from collections import defaultdict

import pytest
from audit import completed
from worlds import MODES, Ran, run, two_tasks, world

from rollart.config.modes import MODES as SETTINGS
from rollart.config.modes import Mode
from rollart.observe.steps import StepFold, StepRecord
from rollart.policy.staleness import timeline
from rollart.types.ids import TrajectoryId
from rollart.types.journal import (
    BatchClaimed,
    EvalEnded,
    GroupOpened,
    StepTrained,
    TrajectoryEnded,
    TrajectoryStarted,
    TurnEnded,
    WeightsSynced,
)
from rollart.types.trajectory import Purpose

INTERRUPT = ("areal", "rollart")
DRAIN = ("sync", "sync_plus", "one_off")
STEPS = 6


@pytest.mark.parametrize("alpha", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_every_claim_lies_on_the_timeline_of_its_mode(mode: str, alpha: int) -> None:
    ran = run(two_tasks(f"mode={mode}", f"alpha={alpha}", f"steps={STEPS}"))
    completed(ran)
    for claim, row in zip(ran.of(BatchClaimed), timeline(SETTINGS[Mode(mode)], alpha, STEPS), strict=True):
        assert (claim.step, claim.trained.step, claim.served.step) == (row.claim, row.claim, row.served)
        assert [lag - stale for lag, stale in zip(claim.lag, claim.staleness, strict=True)] == [
            row.claim - row.served
        ] * len(claim.groups)
        if mode != "areal":
            assert set(claim.staleness) <= set(row.staleness)
            assert set(claim.lag) <= set(row.lag)


def test_rollart_reaches_every_staleness_that_its_timeline_allows() -> None:
    alpha = 2
    reached: defaultdict[int, set[int]] = defaultdict(set)
    for seed in range(5):
        ran = run(world("mode=rollart", f"alpha={alpha}", "steps=8", f"seed={seed}", "tasks.game.environments=8"))
        completed(ran)
        for claim in ran.of(BatchClaimed):
            reached[claim.step].update(claim.staleness)
    assert set().union(*reached.values()) == {0, 1, 2}
    for row in timeline(SETTINGS[Mode.ROLLART], alpha, 8):
        assert reached[row.claim] <= set(row.staleness)


def spans_and_recomputed(ran: Ran) -> tuple[set[TrajectoryId], dict[TrajectoryId, list[int]]]:
    """Trajectories with tokens of two versions or more; and those with recomputed KV, with the turns where it was."""
    versions: defaultdict[TrajectoryId, set[object]] = defaultdict(set)
    recomputed: defaultdict[TrajectoryId, list[int]] = defaultdict(list)
    for turn in ran.of(TurnEnded):
        versions[turn.trajectory].update(version for version, _ in turn.versions)
        if turn.recomputed:
            recomputed[turn.trajectory].append(turn.turn)
    return {id for id, seen in versions.items() if len(seen) > 1}, recomputed


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", INTERRUPT)
def test_kv_is_recomputed_for_exactly_those_that_span_an_update(mode: str, seed: int) -> None:
    """There is one more case: an update while the first prompt is being computed, before any token. Its KV is computed
    again, but all tokens are of the new version."""
    ran = run(world(f"mode={mode}", "alpha=1", "steps=8", f"seed={seed}"))
    completed(ran)
    spanning, recomputed = spans_and_recomputed(ran)
    assert spanning
    assert spanning <= set(recomputed)
    for id in set(recomputed) - spanning:
        assert recomputed[id] == [1]


def test_where_the_time_of_a_step_went_is_told_with_it() -> None:
    ran = run(world("mode=rollart", "alpha=1", "steps=4"))
    fold = StepFold()
    records = [record for event in ran.events for record in fold.take(event)]
    assert len(records) == 4
    assert all(isinstance(record, StepRecord) and 0 < record.busy["trainer"] <= 1 for record in records)


@pytest.mark.parametrize("mode", DRAIN)
def test_where_rollout_drains_nothing_spans_an_update(mode: str) -> None:
    ran = run(world(f"mode={mode}", "alpha=1", "steps=6"))
    completed(ran)
    assert len(ran.of(WeightsSynced)) == 6
    assert spans_and_recomputed(ran) == (set(), {})


def test_engines_that_keep_kv_recompute_nothing() -> None:
    ran = run(world("mode=rollart", "alpha=1", "steps=8", 'sim.engine.kv_on_update="keep"'))
    completed(ran)
    spanning, recomputed = spans_and_recomputed(ran)
    assert spanning
    assert recomputed == {}


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_rounds_run_in_every_mode_and_are_never_trained(mode: str) -> None:
    ran = run(
        two_tasks(f"mode={mode}", "eval_every=2", "tasks.game.eval_episodes=3", "tasks.math.eval_episodes=2", "steps=4")
    )
    completed(ran)  # the audit knows that an evaluation is never trained
    rounds = {(round.task, round.step): (round.episodes, round.scored) for round in ran.of(EvalEnded)}
    assert rounds == {(task, step): (count, count) for task, count in (("game", 3), ("math", 2)) for step in (0, 2, 4)}
    held_out = [group for group in ran.of(GroupOpened) if group.purpose is Purpose.EVAL]
    assert len(held_out) == 3 * (3 + 2)
    by_group = {group.group: group.prompt for group in held_out}
    assert len(set(by_group.values())) == 3 + 2, "every round asks the same held-out prompts"
    assert not set(by_group.values()) & {g.prompt for g in ran.of(GroupOpened) if g.purpose is Purpose.TRAIN}
    assert sum(started.group in by_group for started in ran.of(TrajectoryStarted)) == 15


def test_evaluation_beside_training_leaves_most_environments_to_it() -> None:
    ran = run(
        world("mode=rollart", "eval_every=4", "tasks.game.eval_episodes=40", "tasks.game.environments=16", "steps=12")
    )
    completed(ran)
    assert [round.step for round in ran.of(EvalEnded)] == [0, 4, 12], "the one at 8 was not over in time"
    held_out = [group.group for group in ran.of(GroupOpened) if group.purpose is Purpose.EVAL]
    steps = {group: (0, 4, 12)[number // 40] for number, group in enumerate(held_out)}
    trained = [event.at for event in ran.of(StepTrained)]
    running: set[TrajectoryId] = set()
    most = {0: 0, 4: 0, 12: 0}
    for event in ran.events:
        if isinstance(event, TrajectoryStarted) and event.group in steps:
            running.add(event.trajectory)
            if event.at <= trained[-1] or steps[event.group] == 12:
                most[steps[event.group]] = max(most[steps[event.group]], len(running))
        elif isinstance(event, TrajectoryEnded):
            running.discard(event.trajectory)
    assert most == {0: 16, 4: 4, 12: 16}


def test_a_long_evaluation_is_no_stall() -> None:
    """What is waited for is the next episode's end, not that of the whole round."""
    ran = run(
        world(
            "mode=sync_plus",
            "eval_every=2",
            "tasks.game.eval_episodes=40",
            "tasks.game.environments=4",
            "deadlines.turn_s=4",
        )
    )
    completed(ran)
    assert max(b.at - a.at for a, b in zip(ran.of(EvalEnded), ran.of(EvalEnded)[1:], strict=False)) > 8
