"""The lines of a run: what they tell of the journal, and that they leave it as it is."""

import pytest

from rollart.app.progress import ProgressLogger
from rollart.observe.journal import MemoryJournal
from rollart.observe.steps import StepFold, StepRecord
from rollart.sim.run import simulate
from rollart.sim.scenario import load_scenario
from rollart.types import journal as j
from rollart.types.ids import ClaimId, GroupId, PromptId, TrajectoryId
from rollart.types.trajectory import TRAINABLE, GroupOutcome, Outcome, Purpose
from rollart.types.versions import Version

V0, V1, V2 = (Version(0, step) for step in range(3))


def group(number: int, rewards: list[float | None], outcome: GroupOutcome, purpose: Purpose = Purpose.TRAIN):
    """A group that was opened, run and ended; a member without a reward failed."""
    members = [TrajectoryId(10 * number + member) for member in range(len(rewards))]
    yield j.GroupOpened(1.0, GroupId(number), "maze", PromptId(number), purpose, number, 0)
    for index, member in enumerate(members):
        yield j.TrajectoryStarted(1.0, member, GroupId(number), index, 0, "slot")
    for member, reward in zip(members, rewards, strict=True):
        ended = Outcome.ENV_FAILED if reward is None else Outcome.COMPLETED
        yield j.TrajectoryEnded(2.0, member, ended, 1, 3, reward)
    yield j.GroupEnded(2.0, GroupId(number), outcome, requeued=False)


def step(number: int, kept: float):
    claim = ClaimId(number)
    yield j.BatchClaimed(3.0, claim, number, V0, V0, (GroupId(0),), (TrajectoryId(0),), (0,), (0,), (), {"maze": kept})
    yield j.StepTrained(4.0, claim, Version(0, number + 1), 1.0, {"loss": 0.25})


JOURNAL = [
    j.RunStarted(0.0, "run", "rollart", 1, 0, {"maze": 1}, 2),
    *group(0, [0.0, 1.0], GroupOutcome.TRAINED),
    *group(1, [1.0, 1.0], GroupOutcome.FILTERED),
    *group(2, [1.0, None], GroupOutcome.FAILED),
    *group(3, [0.0], GroupOutcome.TRAINED, Purpose.EVAL),
    *step(0, 0.5),
    *step(1, 0.25),
]


def lines(events: list[j.JournalEvent]) -> list[str]:
    out: list[str] = []
    journal = MemoryJournal()
    logger = ProgressLogger(journal, out.append, 2)
    for event in events:
        logger.append(event)
    assert journal.events == events
    return out


def test_the_reward_of_a_step_is_that_of_all_that_finished_and_the_batch_is_named_as_such() -> None:
    first, second = lines(JOURNAL)
    assert first == "step 1/2 at 4.0 s: v0.1, maze reward 0.800 (kept 0.500), staleness ≤ 0, loss 0.25"
    assert "maze reward of the batch 0.250" in second, "nothing finished since the batch before"


def test_what_finished_for_a_claim_that_was_returned_counts_for_the_next() -> None:
    returned = [*JOURNAL[:-3], j.ClaimReturned(4.0, ClaimId(0), "the trainer was lost"), *step(1, 0.25)]
    (line,) = lines(returned)
    assert "maze reward 0.800 (kept 0.250)" in line


def test_a_step_beside_rollout_has_what_finished_before_its_claim() -> None:
    claim, trained = step(0, 0.5)
    late = list(group(4, [0.0, 0.0], GroupOutcome.FILTERED))
    first, second = lines([*JOURNAL[:-4], claim, *late, trained, *step(1, 0.25)])
    assert "maze reward 0.800 (kept 0.500)" in first
    assert "maze reward 0.000 (kept 0.250)" in second


def test_a_run_that_filters_tells_what_it_gets_and_not_what_it_keeps() -> None:
    """In virtual time: every step of every task, against the trajectories that ended between two claims."""
    ran = simulate(load_scenario("laptop", ["steps=6", "algorithm.filter_zero_variance=true"]))
    fold = StepFold()
    records = [record for event in ran.events for record in fold.take(event)] + fold.finish()
    steps = [record for record in records if isinstance(record, StepRecord)]
    purposes = {event.group: event for event in ran.events if isinstance(event, j.GroupOpened)}
    tasks = {
        event.trajectory: purposes[event.group].task
        for event in ran.events
        if isinstance(event, j.TrajectoryStarted) and purposes[event.group].purpose is Purpose.TRAIN
    }
    expected: list[dict[str, float]] = []
    since: dict[str, list[float]] = {}
    for event in ran.events:
        if isinstance(event, j.TrajectoryEnded) and event.outcome in TRAINABLE and event.trajectory in tasks:
            since.setdefault(tasks[event.trajectory], []).append(event.reward)
        elif isinstance(event, j.BatchClaimed):
            expected.append({task: sum(rewards) / len(rewards) for task, rewards in since.items()})
            since = {}
    assert any(isinstance(event, j.GroupEnded) and event.outcome is GroupOutcome.FILTERED for event in ran.events)
    assert [step.rewards for step in steps] == [pytest.approx(means) for means in expected]
    for line, step in zip(lines(ran.events), steps, strict=True):
        for task, mean in step.rewards.items():
            assert f"{task} reward {mean:.3f} (kept {step.kept_rewards[task]:.3f})" in line
    assert all(set(step.rewards) == set(step.kept_rewards) for step in steps)
