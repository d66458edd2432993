"""Engines that die, fall silent, come late or cannot take a version: the run goes on, or says why not."""

import math
from collections.abc import Sequence

import pytest
from audit import completed, lengths_add_up, sound
from worlds import Echo, Events, Kill, KillAtCommand, LateJoin, Ran, Silent, Tap, run, world

from rollart.types.errors import NoEngine, WorkerLost
from rollart.types.ids import RequestId, TrajectoryId, WorkerId
from rollart.types.journal import (
    EngineOutOfService,
    EngineUpdated,
    Placed,
    StallReported,
    TrajectoryEnded,
    TurnAborted,
    WeightsSynced,
    WorkerDied,
    WorkerJoined,
    WorkerSpawned,
)
from rollart.types.messages import Add, Progress, Staged, StageFailed, TurnDone, Updated
from rollart.types.trajectory import Outcome

ENGINE = "engine/wide/0"


def spawned(ran: Ran, place: str) -> list[WorkerId]:
    return [event.worker for event in ran.of(WorkerSpawned) if event.worker.startswith(f"{place}.")]


def outcomes(ran: Ran) -> set[Outcome]:
    return {event.outcome for event in ran.of(TrajectoryEnded)}


@pytest.mark.parametrize("mode", ["sync", "rollart"])
@pytest.mark.parametrize("nth", [1, 6, 15])
def test_trajectories_of_a_killed_engine_go_on_elsewhere_without_losing_a_token(mode: str, nth: int) -> None:
    tap = Tap()
    ran = run(
        world(f"mode={mode}", "sim.engine.progress_interval_s=0.02"), KillAtCommand(ENGINE, Add, nth, after_s=0.07), tap
    )
    completed(ran)
    assert ran.killed == [f"{ENGINE}.0"]
    assert outcomes(ran) == {Outcome.COMPLETED}
    assert spawned(ran, ENGINE) == [f"{ENGINE}.0", f"{ENGINE}.1"]
    assert lengths_add_up(tap) == []
    resumed = [add for _, _, add in tap.of(Add) if add.prefix_length == 0]
    moved = [event for event in ran.of(Placed) if event.engine == "engine/wide/1.0"]
    assert resumed
    assert moved
    assert any(event.engine == f"{ENGINE}.1" for event in ran.of(Placed)), "the restarted engine gets work again"


def test_an_engine_that_keeps_dying_is_removed_and_the_rest_goes_on() -> None:
    ran = run(world("steps=6"), KillAtCommand(ENGINE, Add, 2, after_s=0.01, incarnations=9))
    completed(ran)
    actions = [event.action for event in ran.of(WorkerDied)]
    assert len(actions) == 2
    assert actions[0] == "restarts in 1 s"
    assert actions[1].startswith("removed")
    assert outcomes(ran) == {Outcome.COMPLETED}


@pytest.mark.parametrize("mode", ["sync", "one_off", "rollart"])
def test_when_all_engines_keep_dying_the_run_ends_with_a_typed_error(mode: str) -> None:
    ran = run(world(f"mode={mode}"), KillAtCommand("engine", Add, 2, after_s=0.01, incarnations=99))
    sound(ran)
    assert isinstance(ran.error, WorkerLost)
    assert "engine" in str(ran.error)
    assert ran.events[-1].at < 60
    assert outcomes(ran) <= {Outcome.COMPLETED, Outcome.CANCELLED}


def test_when_no_engine_comes_back_the_run_ends_with_a_typed_error() -> None:
    ran = run(world("deadlines.no_engine_s=20"), Kill("engine", 0.7), LateJoin("engine", math.inf, first=1))
    sound(ran)
    assert isinstance(ran.error, NoEngine)
    assert ran.events[-1].at == pytest.approx(20.7)


def test_an_engine_that_starts_and_never_serves_does_not_keep_a_dead_fleet_alive() -> None:
    rules = (Kill("engine", 0.7), Events("engine", Staged, lambda w, e, _: () if w.endswith(".1") else (e,)))
    ran = run(world("deadlines.no_engine_s=20", "deadlines.stage_s=100"), *rules)
    sound(ran)
    assert isinstance(ran.error, NoEngine)


@pytest.mark.timeout(60)
def test_engines_that_never_come_up_are_removed_however_long_a_start_may_take() -> None:
    ran = run(world("deadlines.model_loads_s=700"), LateJoin("engine", math.inf))
    sound(ran)
    assert isinstance(ran.error, WorkerLost)
    assert ran.events[-1].at == pytest.approx(2 * 700 + 1)


def test_what_loads_a_model_has_longer_to_start_than_what_does_not() -> None:
    deadlines = ("deadlines.worker_starts_s=5", "deadlines.model_loads_s=15", "deadlines.train_s=9")
    completed(run(world(*deadlines), LateJoin("engine", 10.0), LateJoin("trainer", 10.0)))
    ran = run(world(*deadlines), LateJoin("reward", 10.0))
    sound(ran)
    assert isinstance(ran.error, WorkerLost)
    assert {died.reason for died in ran.of(WorkerDied)} == {"it did not come up"}


def test_a_silent_engine_is_replaced_within_its_deadline() -> None:
    tap = Tap()
    ran = run(world("deadlines.engine_silent_s=5", "steps=8"), Silent(f"{ENGINE}.0", 0.5), tap)
    completed(ran)
    (died,) = ran.of(WorkerDied)
    assert died.worker == f"{ENGINE}.0"
    assert "silent" in died.reason
    assert 5.0 <= died.at <= 0.5 + 5.0 + 0.1
    assert outcomes(ran) <= {Outcome.COMPLETED, Outcome.STALE, Outcome.REDUNDANT}
    assert lengths_add_up(tap) == []


def test_an_engine_that_is_silent_from_its_first_request_is_noticed_too() -> None:
    ran = run(world("deadlines.engine_silent_s=5", "steps=8"), Silent(f"{ENGINE}.0", 0.07))
    completed(ran)
    assert [died.worker for died in ran.of(WorkerDied)] == [f"{ENGINE}.0"]


@pytest.mark.timeout(100)
def test_silence_is_noticed_whatever_the_clock_says() -> None:
    """For one clock time in a hundred, (heard + limit) - heard is an ulp short of the limit: time stood still there."""
    limit_s, served_at = 30.0, 0.06
    resets = (19 + thousandth / 1000 for thousandth in range(10_000))
    reset_s = next(s for s in resets if (heard := served_at + s) + limit_s - heard < limit_s and _stuck(heard, limit_s))
    ran = run(world(f"sim.tasks.game.reset_s={reset_s}", "steps=2"), Silent(f"{ENGINE}.0", 1.0))
    completed(ran)
    assert [died.worker for died in ran.of(WorkerDied)] == [f"{ENGINE}.0"]


def _stuck(heard: float, limit_s: float) -> bool:
    now = heard + limit_s
    return now + (limit_s - (now - heard)) == now


@pytest.mark.parametrize("seconds", [0.3, 0.8, 1.3, 1.9])
def test_a_late_engine_has_the_served_version_before_its_first_request(seconds: float) -> None:
    ran = run(world("mode=rollart", "steps=8"), LateJoin("engine/wide/1", seconds))
    completed(ran)  # the audit refuses a placement on an engine without weights, or with old ones
    late = "engine/wide/1.0"
    first_update = next(event for event in ran.of(EngineUpdated) if event.worker == late)
    first_request = next(event for event in ran.of(Placed) if event.engine == late)
    synced = [event.version.step for event in ran.of(WeightsSynced) if event.at <= first_request.at]
    taken = [
        event.version.step for event in ran.of(EngineUpdated) if event.worker == late and event.at <= first_request.at
    ]
    assert first_update.at <= first_request.at
    assert taken[-1] >= max(synced, default=0)


@pytest.mark.parametrize("killed_at", [0.5, 0.7, 0.9, 1.1, 1.3, 1.5, 1.7])
@pytest.mark.parametrize("rolling", ["true", "false"])
def test_an_engine_that_enters_service_while_others_change_version(killed_at: float, rolling: str) -> None:
    """Its first version may be on its way when a sync to the next one begins."""

    def slow_sync(_: WorkerId, event: Updated, __: int) -> Sequence[tuple[float, Updated]]:
        return ((1.5 if event.version.step else 0.0, event),)

    def slow_entry(worker: WorkerId, event: Updated, _: int) -> Sequence[tuple[float, Updated]]:
        return ((1.0 if worker.endswith(".1") and event.version.step == 1 else 0.0, event),)

    ran = run(
        world("mode=rollart", f"rolling_update={rolling}"),
        Events(ENGINE, Updated, slow_sync),
        Events("engine/wide/1", Updated, slow_entry),
        Kill("engine/wide/1", killed_at),
    )
    completed(ran)
    assert ran.events[-1].at < 60


def test_an_engine_that_cannot_stage_goes_out_of_service_and_the_rest_goes_on() -> None:
    def broken(_: WorkerId, event: Staged, __: int) -> Sequence[Staged | StageFailed]:
        return (event if event.version.step == 0 else StageFailed(event.version, "a bucket has another digest"),)

    ran = run(world("mode=rollart", "steps=6"), Events(ENGINE, Staged, broken))
    completed(ran)
    out = ran.of(EngineOutOfService)
    assert {event.worker for event in out} == {f"{ENGINE}.0", f"{ENGINE}.1"}
    assert "digest" in out[0].reason
    assert {event.version.step for event in ran.of(EngineUpdated) if event.worker.startswith(ENGINE)} == {0}
    assert outcomes(ran) == {Outcome.COMPLETED}


def test_a_version_that_nobody_can_stage_ends_the_run_with_a_typed_error() -> None:
    def broken(_: WorkerId, event: Staged, __: int) -> Sequence[Staged | StageFailed]:
        return (event if event.version.step == 0 else StageFailed(event.version, "corrupt"),)

    ran = run(world("mode=rollart"), Events("engine", Staged, broken))
    sound(ran)
    assert isinstance(ran.error, WorkerLost)
    assert ran.events[-1].at < 60


def test_an_engine_that_never_commits_is_replaced() -> None:
    def lost(worker: WorkerId, event: Updated, _: int) -> Sequence[Updated]:
        return () if worker == f"{ENGINE}.0" and event.version.step == 2 else (event,)

    ran = run(world("mode=rollart", "deadlines.update_s=3"), Events(ENGINE, Updated, lost))
    completed(ran)
    (died,) = ran.of(WorkerDied)
    assert "committing v0.2" in died.reason


@pytest.mark.parametrize("kind", [Staged, Updated])
@pytest.mark.parametrize("after_s", [0.1, 0.3, 0.5, 0.8])
def test_a_late_copy_of_an_answer_does_not_end_another_wait(kind: type, after_s: float) -> None:
    """The copy arrives while the engine is waited for with something else, which then gets lost."""

    def lost(worker: WorkerId, event: Updated, _: int) -> Sequence[Updated]:
        return () if worker == f"{ENGINE}.0" and event.version.step == 2 else (event,)

    rules = (Echo(kind, after_s), Events(ENGINE, Updated, lost))
    ran = run(world("mode=rollart", "deadlines.update_s=3"), *rules)
    completed(ran)
    assert ran.events[-1].at < 10


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slow", ["engine/wide/0", "engine/wide/1"])
def test_rolling_updates_never_move_a_session_to_an_older_engine(slow: str, seed: int) -> None:
    """While one engine is ahead of another, tokens are newer than what the run as a whole serves."""

    def late(_: WorkerId, event: Updated, __: int) -> Sequence[tuple[float, Updated]]:
        return ((0.5, event),)

    ran = run(
        world("rolling_update=true", "mode=rollart", "steps=6", "tasks.game.environments=6", f"seed={seed}"),
        Events(slow, Updated, late),
        Kill("engine/wide/0", 1.6),
    )
    completed(ran)
    assert all(event.suspended_s == 0 for event in ran.of(WeightsSynced))


def test_rolling_updates_go_through_the_engines_one_by_one() -> None:
    tap = Tap()
    completed(run(world("rolling_update=true", "mode=areal", "pools.wide.engines=3", "steps=3"), tap))
    for step in (1, 2, 3):
        at = [(time, worker) for time, worker, event in tap.of(Updated) if event.version.step == step]
        assert [worker for _, worker in at] == [f"engine/wide/{index}.0" for index in range(3)]


def told(tap: Tap) -> dict[TrajectoryId, int]:
    """Tokens that engines sampled, by trajectory."""
    session_of: dict[RequestId, TrajectoryId] = {add.request: add.session for _, _, add in tap.of(Add)}
    sums = dict.fromkeys(session_of.values(), 0)
    for _, _, event in tap.of(TurnDone):
        sums[session_of[event.request]] += event.generated.tokens.length
    for _, _, event in tap.of(Progress):
        for request, generated in event.parts:
            sums[session_of[request]] += generated.tokens.length
    return sums


def test_every_sampled_token_is_in_the_log() -> None:
    tap = Tap()
    ran = run(world("mode=rollart"), tap)
    assert {end.trajectory: end.sampled for end in ran.of(TrajectoryEnded)} == told(tap)


def test_tokens_of_a_stopped_turn_are_counted_too() -> None:
    tap = Tap()
    ran = run(world("mode=rollart", "batch.extra_members=2"), tap)
    completed(ran)
    aborted = sum(event.sampled for event in ran.of(TurnAborted))
    assert aborted > 0
    assert sum(end.sampled for end in ran.of(TrajectoryEnded)) + aborted == sum(told(tap).values())


def test_a_stall_report_names_only_what_is_waited_for() -> None:
    """An idle engine owes nobody an answer."""
    ran = run(
        world("mode=sync", "sim.tasks.game.reward_s=40", "deadlines.stall_report_s=5", "deadlines.engine_silent_s=500")
    )
    completed(ran)
    stalls = ran.of(StallReported)
    assert stalls
    for stall in stalls:
        assert stall.waits
        assert not [line for line in stall.waits if line.startswith("engine")]


def test_workers_join_before_they_work() -> None:
    ran = run(world())
    joined = {event.worker: event.at for event in ran.of(WorkerJoined)}
    assert all(joined[event.engine] <= event.at for event in ran.of(Placed))
