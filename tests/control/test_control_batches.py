"""Shares, back-pressure, durable claims and the trainer: what a batch holds and what becomes of it."""

from collections.abc import Sequence

import pytest
from audit import audit, completed, sound
from worlds import MODES, SNAIL, Commands, Events, Kill, KillAtCommand, Ran, Rule, SlowSink, run, two_tasks, world

import rollart.control.groups as groups_module
from rollart.config.modes import MODES as SETTINGS
from rollart.config.modes import Mode
from rollart.policy.admission import batches_in_the_making
from rollart.policy.shares import ShareBook, ShareRule
from rollart.types.errors import InvariantBroken, RunError, ShareUnfilled, TrainingFailed, WorkerLost
from rollart.types.failures import StopReason
from rollart.types.ids import GroupId, WorkerId
from rollart.types.journal import (
    BatchClaimed,
    CheckpointFailed,
    CheckpointSaved,
    ClaimReturned,
    EpochStarted,
    GroupEnded,
    GroupOpened,
    RunEnded,
    RunStarted,
    ShareRedistributed,
    StallReported,
    StepTrained,
    TrajectoryEnded,
    WeightsSynced,
    WorkerDied,
)
from rollart.types.messages import (
    Publish,
    Published,
    Reset,
    RewardInfo,
    Saved,
    SaveFailed,
    Train,
    Trained,
    TrainerFailed,
    WorkerCommand,
    WorkerInfo,
)
from rollart.types.trajectory import GroupOutcome, Outcome, Purpose

# --- shares ---------------------------------------------------------------------------------------------------------


def no_math() -> Rule:
    return KillAtCommand("environment/math", Reset, 1, incarnations=99)


@pytest.mark.parametrize("mode", ["sync", "sync_plus", "rollart"])
def test_the_share_of_a_task_without_environments_is_filled_by_another(mode: str) -> None:
    ran = run(two_tasks(f"mode={mode}", "tasks.math.share_deadline_s=40", "steps=3"), no_math())
    completed(ran)  # the audit compares every batch with its shares and what was redistributed
    moved = ran.of(ShareRedistributed)
    assert [(event.step, event.missing, event.filled_by) for event in moved] == [
        (step, {"math": 1}, {"game": 1}) for step in range(3)
    ]


def test_or_the_run_stops_by_config() -> None:
    scenario = two_tasks("tasks.math.share_deadline_s=40", 'tasks.math.unfilled="stop"')
    ran = run(scenario, no_math())
    sound(ran)
    assert isinstance(ran.error, ShareUnfilled)
    assert "math" in str(ran.error)
    assert ran.events[-1].at == pytest.approx(40.0, abs=1.0)


def test_a_task_alone_that_cannot_fill_its_share_stops_the_run() -> None:
    def never(_: WorkerId, __: Reset, ___: int) -> Sequence[WorkerCommand]:
        return ()

    settings = ("tasks.game.share_deadline_s=30", "tasks.game.reset_deadline_s=4")
    ran = run(world(*settings), Commands("environment", Reset, never))
    sound(ran)
    assert isinstance(ran.error, ShareUnfilled)
    assert {end.outcome for end in ran.of(TrajectoryEnded)} <= {Outcome.ENV_FAILED, Outcome.CANCELLED}


def test_a_role_without_workers_stops_the_run() -> None:
    ran = run(world(), KillAtCommand("environment", Reset, 1, incarnations=99))
    sound(ran)
    assert isinstance(ran.error, WorkerLost)
    assert "environment" in str(ran.error)


def test_a_share_deadline_has_passed_when_it_asked_to_be_woken() -> None:
    """Otherwise virtual time stands still there: woken, nothing to do, woken again at the same moment."""
    for since in (0.1 * tenth for tenth in range(20_000)):
        book = ShareBook({"game": ShareRule(1, 3600.0, "stop")})
        book.wait_started(since)
        wake = book.next_wake()
        assert wake is not None
        assert book.check({}, wake) is not None, since


# --- back-pressure --------------------------------------------------------------------------------------------------


def admission_holds(ran: Ran, extra: int = 0) -> int:
    """At every opening the groups open or ready fit into the batches to come; gives the most there ever were."""
    started: RunStarted = ran.of(RunStarted)[0]
    mode, per_batch = SETTINGS[Mode(started.mode)], sum(started.groups_per_batch.values())
    in_the_making: set[GroupId] = set()
    served = claims = most = 0
    for event in ran.events:
        match event:
            case GroupOpened() if event.purpose is Purpose.TRAIN:
                in_the_making.add(event.group)
                batches = batches_in_the_making(mode, alpha=started.alpha, served=served, claims=claims)
                assert len(in_the_making) <= batches * per_batch + extra, event
            case GroupEnded():
                in_the_making.discard(event.group)
            case BatchClaimed():
                in_the_making -= set(event.groups)
                claims += 1
            case WeightsSynced():
                served = event.version.step
            case _:
                pass
        most = max(most, len(in_the_making))
    return most


@pytest.mark.parametrize("flush_s", [0.0, 3.0])
@pytest.mark.parametrize("mode", MODES)
def test_a_slow_trainer_holds_rollout_back(mode: str, flush_s: float) -> None:
    scenario = world(
        f"mode={mode}", "steps=5", "alpha=1", f"sim.hardware.snail={SNAIL}", 'sim.trainer.hardware="snail"'
    )
    ran = run(scenario, sink=SlowSink(flush_s))
    completed(ran)
    trained = [event.seconds for event in ran.of(StepTrained)]
    assert min(trained) > 1.5, "the trainer is the bottleneck"
    assert admission_holds(ran) <= (3 if SETTINGS[Mode(mode)].interrupt else 1) * 2
    assert {event.outcome for event in ran.of(GroupEnded)} == {GroupOutcome.TRAINED}


@pytest.mark.parametrize("flush_s", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("mode", ["sync_plus", "one_off", "rollart"])
def test_a_slow_disk_wastes_nothing(mode: str, flush_s: float) -> None:
    """What starts while a claim is being written is for the next batch, and is not thrown away with the last one."""
    ran = run(world(f"mode={mode}", "steps=5"), sink=SlowSink(flush_s))
    completed(ran)
    assert {event.outcome for event in ran.of(GroupEnded)} == {GroupOutcome.TRAINED}
    admission_holds(ran)


class TrainsOnlyWhatIsDurable(Rule):
    """Looks at the journal's disk at the moment at which the trainer is sent a batch."""

    def __init__(self, sink: SlowSink) -> None:
        self._sink = sink
        self.batches = 0

    def command(self, worker: WorkerId, command: WorkerCommand) -> Sequence[WorkerCommand]:
        if isinstance(command, Train):
            claimed = [isinstance(e, BatchClaimed) and e.claim == command.claim for e in self._sink.events].index(True)
            assert claimed < self._sink.flushed[-1], "the trainer saw a batch whose claim was not on disk"
            self.batches += 1
        return super().command(worker, command)


@pytest.mark.parametrize("mode", MODES)
def test_a_claim_is_durable_before_the_trainer_sees_it(mode: str) -> None:
    sink = SlowSink(0.7)
    rule = TrainsOnlyWhatIsDurable(sink)
    completed(run(world(f"mode={mode}"), rule, sink=sink))
    assert rule.batches == 4


class FailingSink(SlowSink):
    """The disk is full from the third flush on."""

    async def flush(self) -> None:
        await super().flush()
        if len(self.flushed) >= 3:
            raise RunError("the journal cannot be written (disk full)")


def test_a_claim_that_cannot_be_written_is_returned_and_never_trained() -> None:
    ran = run(world("mode=rollart"), sink=FailingSink(0.1))
    sound(ran)
    assert "disk full" in str(ran.error)
    assert [event.claim for event in ran.of(ClaimReturned)] == [1]
    assert [event.claim for event in ran.of(StepTrained)] == [0]


# --- the trainer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "one_off", "rollart"])
def test_a_failed_step_returns_its_claim(mode: str) -> None:
    def fail(_: WorkerId, event: Trained, __: int) -> Sequence[Trained | TrainerFailed]:
        return (TrainerFailed(event.claim, "loss is nan"),) if event.claim == 2 else (event,)

    ran = run(world(f"mode={mode}"), Events("trainer", Trained, fail))
    sound(ran)
    assert isinstance(ran.error, TrainingFailed)
    assert "loss is nan" in str(ran.error)
    assert [event.claim for event in ran.of(ClaimReturned)] == [2]
    (last,) = ran.of(RunEnded)
    assert last.stop is StopReason.TRAINING_FAILED
    assert last.reason.startswith("TrainingFailed: ")


@pytest.mark.parametrize("kind", [Train, Publish])
def test_a_trainer_that_hangs_is_replaced_until_it_is_clear_that_this_does_not_help(kind: type) -> None:
    def hang(_: WorkerId, command: WorkerCommand, number: int) -> Sequence[WorkerCommand]:
        return () if number > 2 else (command,)

    ran = run(world("deadlines.train_s=20", "deadlines.publish_s=20"), Commands("trainer", kind, hang))
    sound(ran)
    assert isinstance(ran.error, WorkerLost)
    assert "trainer" in str(ran.error)
    assert len([event for event in ran.of(WorkerDied) if event.worker.startswith("trainer")]) == 6


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("at", [0.01, 0.5, 0.97, 1.6])
def test_a_dead_trainer_comes_back_from_its_checkpoint(at: float, every: int) -> None:
    ran = run(world(f"checkpoint_every={every}"), Kill("trainer/0", at))
    completed(ran)
    assert [event.epoch for event in ran.of(EpochStarted)] == [0, 1]
    saved = [event.version.step for event in ran.of(CheckpointSaved) if event.version.epoch == 0]
    assert ran.of(EpochStarted)[1].step == max(saved, default=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("every", [0, 2, 3])
def test_the_last_step_is_always_saved(mode: str, every: int) -> None:
    ran = run(world(f"mode={mode}", f"checkpoint_every={every}", "steps=5"))
    completed(ran)
    due = {0: [5], 2: [2, 4, 5], 3: [3, 5]}[every]
    assert [event.version.step for event in ran.of(CheckpointSaved)] == due


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_last_save_that_fails_is_tried_again_until_it_is_hopeless(failures: int) -> None:
    def fail(_: WorkerId, event: Saved, number: int) -> Sequence[Saved | SaveFailed]:
        return (SaveFailed(event.version, "the disk is full"),) if number <= failures else (event,)

    ran = run(world("checkpoint_every=0", "steps=3"), Events("trainer", Saved, fail))
    assert len(ran.of(CheckpointFailed)) == failures
    if failures < 3:
        completed(ran)
        assert [event.version.step for event in ran.of(CheckpointSaved)] == [3]
    else:
        sound(ran)
        assert isinstance(ran.error, TrainingFailed)
        assert "3 times in a row: the disk is full" in str(ran.error)
        assert ran.of(StepTrained)[-1].version.step == 3


def test_a_publication_that_fails_ends_the_run_after_the_step_it_belongs_to() -> None:
    def fail(_: WorkerId, event: Published, __: int) -> Sequence[Published | TrainerFailed]:
        return (TrainerFailed(None, "store is full"),) if event.manifest.version.step == 2 else (event,)

    ran = run(world(), Events("trainer", Published, fail))
    sound(ran)
    assert isinstance(ran.error, TrainingFailed)
    assert ran.events[-1].steps == 2  # type: ignore[union-attr]


# --- nothing is swallowed -------------------------------------------------------------------------------------------


class Impostor(Rule):
    """An environment worker that describes itself as something else."""

    def start(self, runtime: object) -> None:
        joined = runtime.joined  # type: ignore[attr-defined]

        def told(worker: WorkerId, info: WorkerInfo) -> None:
            joined(worker, RewardInfo(1) if worker.startswith("environment") else info)

        runtime.joined = told  # type: ignore[attr-defined]


def test_a_broken_invariant_in_a_callback_of_the_loop_ends_the_run() -> None:
    """The loop would log it and go on."""
    ran = run(world(), Impostor())
    assert isinstance(ran.error, InvariantBroken)
    (last,) = ran.of(RunEnded)
    assert last.stop is StopReason.INVARIANT_BROKEN
    assert ran.complaints == []


def test_an_error_of_our_own_ends_the_run_and_the_journal_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> str | None:
        raise ZeroDivisionError("in the filter")

    monkeypatch.setattr(groups_module, "has_no_signal", broken)
    sink = SlowSink(0.0)
    with pytest.raises(ZeroDivisionError):
        run(world("algorithm.filter_zero_variance=true"), sink=sink)
    assert audit(sink.events) == []
    last = sink.events[-1]
    assert isinstance(last, RunEnded)
    assert (last.stop, last.reason) == (StopReason.FAILED, "ZeroDivisionError: in the filter")


def test_what_is_waited_for_is_said_when_nothing_moves() -> None:
    def hang(_: WorkerId, __: WorkerCommand, ___: int) -> Sequence[WorkerCommand]:
        return ()

    ran = run(world("deadlines.stall_report_s=50", "deadlines.train_s=500"), Commands("trainer", Train, hang))
    sound(ran)
    stalls = ran.of(StallReported)
    assert stalls
    assert any("trainer/0.0: training v0.1" in line for line in stalls[0].waits)
