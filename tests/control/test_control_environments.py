"""Environments and rewards that fail, hang, answer late or twice: an outcome of its own, never a reward of 0."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from audit import completed, sound
from worlds import Commands, Echo, Events, Kill, Ran, doubled, run, two_tasks, world

from rollart.observe.journal import digest
from rollart.policy.health import REWARD
from rollart.types.errors import ShareUnfilled, TaskBroken
from rollart.types.failures import FailureKind
from rollart.types.ids import WorkerId
from rollart.types.journal import Quarantined, TrajectoryEnded, TrajectoryStarted, WorkerDied, WorkerSpawned
from rollart.types.messages import (
    Abort,
    Add,
    Close,
    EnvironmentFailed,
    Observed,
    Publish,
    Published,
    Reset,
    Scored,
    ScoreFailed,
    ScoreRequest,
    Stage,
    Staged,
    Step,
    Train,
    Trained,
    TurnDone,
    Update,
    Updated,
)
from rollart.types.trajectory import Outcome


def ended(ran: Ran, outcome: Outcome) -> list[TrajectoryEnded]:
    return [event for event in ran.of(TrajectoryEnded) if event.outcome is outcome]


def started_at(ran: Ran) -> dict[int, TrajectoryStarted]:
    return {event.trajectory: event for event in ran.of(TrajectoryStarted)}


@pytest.mark.parametrize("mode", ["sync", "sync_plus", "rollart"])
def test_a_reset_that_hangs_ends_at_its_deadline_and_the_group_still_fills(mode: str) -> None:
    def hang(_: WorkerId, command: Reset, __: int) -> Sequence[Reset]:
        return () if command.slot == 3 else (command,)

    all_or_nothing = ("batch.min_group_size=4", 'tasks.game.stale="mask"')
    settings = (f"mode={mode}", "tasks.game.reset_deadline_s=2", "steps=8")
    ran = run(world(*settings, *all_or_nothing), Commands("environment", Reset, hang))
    completed(ran)
    failed = ended(ran, Outcome.ENV_FAILED)
    assert failed
    for end in failed:
        start = started_at(ran)[end.trajectory]
        assert start.environment.endswith("#3")
        assert end.at - start.at == pytest.approx(2.0)
        assert "reset" in end.cause
        assert end.failure is FailureKind.DEADLINE


def test_a_slot_that_keeps_failing_is_quarantined_longer_each_time() -> None:
    def fail(_: WorkerId, command: Reset, __: int) -> Sequence[Reset]:
        return () if command.slot == 3 else (command,)

    ran = run(
        world("mode=rollart", "steps=60", "tasks.game.reset_deadline_s=1", "sim.tasks.game.step_s=8"),
        Commands("environment", Reset, fail),
    )
    completed(ran)
    marks = ran.of(Quarantined)
    assert {mark.part for mark in marks} == {"environment/game/0.0#3"}
    assert [round(mark.until - mark.at) for mark in marks[:4]] == [60, 120, 240, 300]
    for mark in marks:
        starts = [event.at for event in ran.of(TrajectoryStarted) if event.environment.endswith("#3")]
        assert not [at for at in starts if mark.at < at < mark.until]


def test_a_step_that_is_never_answered_ends_at_its_deadline() -> None:
    def lost(_: WorkerId, event: Observed, number: int) -> Sequence[Observed]:
        return () if event.turn and number % 17 == 0 else (event,)

    ran = run(world("tasks.game.step_deadline_s=3"), Events("environment", Observed, lost))
    completed(ran)
    failed = ended(ran, Outcome.ENV_FAILED)
    assert failed
    assert all("step" in end.cause and end.reward is None for end in failed)
    assert {end.failure for end in failed} == {FailureKind.DEADLINE}


@pytest.mark.parametrize("mode", ["sync", "one_off", "rollart"])
@pytest.mark.parametrize("at", [0.2, 0.6, 1.1])
def test_a_dead_environment_worker_is_replaced_and_its_episodes_are_no_result(mode: str, at: float) -> None:
    ran = run(world(f"mode={mode}", "tasks.game.environments_per_worker=6"), Kill("environment/game/1", at))
    completed(ran)
    (died,) = ran.of(WorkerDied)
    assert died.worker == "environment/game/1.0"
    assert "environment/game/1.1" in [event.worker for event in ran.of(WorkerSpawned)]
    for end in ended(ran, Outcome.ENV_FAILED):
        # Who was at an engine learns of it when it acts next.
        assert at <= end.at <= at + 1.0
        assert started_at(ran)[end.trajectory].environment.startswith("environment/game/1.0#")
        assert end.reward is None
        assert end.failure is FailureKind.WORKER_LOST
    in_it = [s for s in ran.of(TrajectoryStarted) if s.environment.startswith("environment/game/1.0#") and s.at < at]
    over = {e.trajectory for e in ran.of(TrajectoryEnded) if e.at < at}
    assert {e.trajectory for e in ended(ran, Outcome.ENV_FAILED)} <= {s.trajectory for s in in_it} - over


@pytest.mark.parametrize("turn", [0, 1])
def test_a_task_whose_environments_are_all_wrong_stops_the_run(turn: int) -> None:
    def wrong(_: WorkerId, event: Observed, __: int) -> Sequence[Observed | EnvironmentFailed]:
        failed = EnvironmentFailed(event.episode, event.turn, "the observation is an int", permanent=True)
        return (failed if event.turn == turn else event,)

    ran = run(two_tasks(), Events("environment/math", Observed, wrong))
    sound(ran)
    assert isinstance(ran.error, TaskBroken)
    for word in ("'math'", "all of its 12 environments", "the observation is an int"):
        assert word in str(ran.error)
    assert ran.events[-1].at < 60, "not after the share's deadline of an hour"
    assert all(end.reward is None for end in ended(ran, Outcome.ENV_FAILED))


def test_a_stop_from_outside_is_no_sign_that_a_task_works() -> None:
    """Its group is given up as hopeless and stops the members that still run; they have shown nothing."""

    def wrong(_: WorkerId, event: Observed, number: int) -> Sequence[Observed | EnvironmentFailed]:
        if not event.turn and number % 3:
            return (event,)  # somebody is always in the middle of an episode
        return (EnvironmentFailed(event.episode, event.turn, "NaN", permanent=True),)

    ran = run(world("tasks.game.environments=200"), Events("environment", Observed, wrong))
    sound(ran)
    assert isinstance(ran.error, TaskBroken)
    assert ended(ran, Outcome.CANCELLED)
    assert ran.events[-1].at < 60


def test_a_slot_that_hangs_is_found_although_nothing_waits_for_it_to_the_end() -> None:
    """Its members are replaced, or their groups claimed without them, long before its deadline."""

    def hang(_: WorkerId, command: Reset, __: int) -> Sequence[Reset]:
        return () if command.slot == 3 else (command,)

    settings = ("mode=rollart", "alpha=0", "steps=60", "tasks.game.environments=32", "tasks.game.reset_deadline_s=3")
    ran = run(world(*settings), Commands("environment", Reset, hang))
    completed(ran)
    assert not ended(ran, Outcome.ENV_FAILED)
    assert {mark.part[-2:] for mark in ran.of(Quarantined)} == {"#3"}
    starts = [start.at for start in ran.of(TrajectoryStarted) if start.environment.endswith("#3")]
    assert all(later - earlier >= 3.0 for earlier, later in pairwise(starts)), "it is taken until its deadline"


def test_some_wrong_environments_do_not_stop_it() -> None:
    def wrong(_: WorkerId, event: Observed, number: int) -> Sequence[Observed | EnvironmentFailed]:
        return (EnvironmentFailed(event.episode, event.turn, "NaN", permanent=True) if number % 5 == 0 else event,)

    ran = run(world(), Events("environment", Observed, wrong))
    completed(ran)
    assert ended(ran, Outcome.ENV_FAILED)


def test_a_reward_function_that_is_wrong_stops_the_run() -> None:
    def wrong(_: WorkerId, event: Scored, __: int) -> Sequence[ScoreFailed]:
        return (ScoreFailed(event.key, "the reward function gave nan", retry=False),)

    ran = run(world(), Events("reward", Scored, wrong))
    sound(ran)
    assert isinstance(ran.error, TaskBroken)
    assert "'game': its reward function 'episode_return' failed 8 times in a row" in str(ran.error)
    assert ran.events[-1].at < 60


@pytest.mark.parametrize("kind", [Observed, Scored, TurnDone, Staged, Updated, Trained, Published])
def test_a_doubled_event_changes_nothing(kind: type) -> None:
    scenario = two_tasks(
        "mode=rollart", "sim.tasks.game.step_failure=0.02", "eval_every=2", "tasks.game.eval_episodes=2"
    )
    plain = digest(run(scenario).events)
    twice, later = Events("", kind, doubled), Echo(kind, 0.37)
    assert digest(run(scenario, twice).events) == plain
    assert twice.count
    # A timer more may change the order of others at the same moment, so no digest here.
    completed(run(scenario, later))


@pytest.mark.parametrize("kind", [Reset, Step, Close, Add, Abort, ScoreRequest, Stage, Update, Train, Publish])
def test_a_doubled_command_changes_nothing(kind: type) -> None:
    scenario = two_tasks("mode=rollart", "batch.extra_members=1", "steps=5")
    plain = digest(run(scenario).events)
    twice = Commands("", kind, doubled)
    assert digest(run(scenario, twice).events) == plain
    assert twice.count


def test_an_environment_that_cannot_be_had_is_never_a_reward() -> None:
    ran = run(world("sim.tasks.game.reset_failure=0.2", "sim.tasks.game.step_failure=0.05", "steps=6"))
    completed(ran)  # the audit refuses a reward on a failed outcome
    assert ended(ran, Outcome.ENV_FAILED)


# --- rewards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "rollart"])
def test_a_reward_function_that_is_busy_is_asked_again(mode: str) -> None:
    asked: dict[str, int] = {}

    def busy(_: WorkerId, event: Scored, __: int) -> Sequence[Scored | ScoreFailed]:
        asked[event.key] = asked.get(event.key, 0) + 1
        return (event,) if asked[event.key] > 4 else (ScoreFailed(event.key, "429", retry=True),)

    ran = run(world(f"mode={mode}"), Events("reward", Scored, busy))
    completed(ran)
    assert {end.outcome for end in ran.of(TrajectoryEnded)} <= {Outcome.COMPLETED, Outcome.STALE}
    assert max(asked.values()) == REWARD.failures


def test_a_reward_function_that_is_always_busy_is_given_up() -> None:
    def busy(_: WorkerId, event: Scored, __: int) -> Sequence[Scored | ScoreFailed]:
        return (ScoreFailed(event.key, "503", retry=True),) if event.key in ("t1", "t5") else (event,)

    ran = run(world("mode=sync_plus"), Events("reward", Scored, busy))
    completed(ran)
    failed = ended(ran, Outcome.REWARD_FAILED)
    assert {end.trajectory for end in failed} == {1, 5}
    assert all("503" in end.cause and end.reward is None for end in failed)
    assert {end.failure for end in failed} == {FailureKind.ERROR}


@pytest.mark.parametrize("mode", ["sync", "sync_plus", "areal"])
def test_a_reward_that_never_comes_fails_within_a_bound(mode: str) -> None:
    def never(_: WorkerId, event: Scored, __: int) -> Sequence[Scored]:
        return () if event.key in ("t0", "t2") else (event,)

    ran = run(world(f"mode={mode}", "deadlines.reward_s=2"), Events("reward", Scored, never))
    completed(ran)
    failed = ended(ran, Outcome.REWARD_FAILED)
    assert {end.trajectory for end in failed} == {0, 2}
    assert {end.failure for end in failed} == {FailureKind.DEADLINE}
    backoff_s = sum(REWARD.backoff.delay(attempt) for attempt in range(1, REWARD.failures))
    for end in failed:
        last_turn = max(e.at for e in ran.events if getattr(e, "trajectory", None) == end.trajectory and e.at < end.at)
        # In `sync` the question is only asked when the last episode of the batch is over.
        assert end.at - last_turn <= 2 * REWARD.failures + backoff_s + (5 if mode == "sync" else 0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1.0", None, True])
def test_only_a_finite_number_is_a_reward(value: object) -> None:
    def strange(_: WorkerId, event: Scored, __: int) -> Sequence[Scored]:
        return (Scored(event.key, (value,)),) if event.key == "t2" else (event,)  # type: ignore[arg-type]

    ran = run(world(), Events("reward", Scored, strange))
    completed(ran)
    (failed,) = ended(ran, Outcome.REWARD_FAILED)
    assert failed.trajectory == 2
    assert "not a finite number" in failed.cause
    assert failed.failure is FailureKind.INVALID


def test_questions_of_a_dead_reward_worker_are_asked_elsewhere() -> None:
    ran = run(world("reward_workers=2", "sim.tasks.game.reward_s=0.5"), Kill("reward/0", 0.9))
    completed(ran)
    assert {end.outcome for end in ran.of(TrajectoryEnded)} <= {Outcome.COMPLETED, Outcome.STALE}


def test_without_any_reward_the_run_ends_with_a_typed_error() -> None:
    def refuse(_: WorkerId, event: Scored, __: int) -> Sequence[ScoreFailed]:
        return (ScoreFailed(event.key, "try again later"),)

    ran = run(world("tasks.game.share_deadline_s=20"), Events("reward", Scored, refuse))
    sound(ran)
    assert isinstance(ran.error, ShareUnfilled)


def test_an_environment_that_reports_its_failure_is_believed_at_once() -> None:
    def fail(_: WorkerId, event: Observed, number: int) -> Sequence[Observed | EnvironmentFailed]:
        return (EnvironmentFailed(event.episode, event.turn, "no image"),) if number % 11 == 0 else (event,)

    ran = run(world(), Events("environment", Observed, fail))
    completed(ran)
    failed = ended(ran, Outcome.ENV_FAILED)
    assert failed
    assert all(end.cause == "no image" and end.failure is FailureKind.ERROR for end in failed)


def test_environments_that_failed_together_come_back_one_by_one() -> None:
    def fail_first(_: WorkerId, event: Observed, number: int) -> Sequence[Observed | EnvironmentFailed]:
        return (EnvironmentFailed(event.episode, event.turn, "no network"),) if number <= 12 else (event,)

    ran = run(world("sim.tasks.game.reset_s=0.1", "seed=5"), Events("environment", Observed, fail_first))
    completed(ran)
    failed = ended(ran, Outcome.ENV_FAILED)[:12]
    assert len({end.at for end in failed}) == 1
    slots = [started_at(ran)[end.trajectory].environment for end in failed]
    again = [[event.at for event in ran.of(TrajectoryStarted) if event.environment == slot][1] for slot in slots]
    delays = [at - end.at for at, end in zip(again, failed, strict=True)]
    assert all(0.5 < delay <= 1.0 for delay in delays)
    assert len(set(delays)) == 12
