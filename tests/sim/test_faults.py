"""Each kind of fault acts at the boundary of a worker as specified, as often, and counts its injections."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import pytest
from sim_parts import Driver, add, engine_settings, profile, prompt, publish

from rollart.conformance.echo import FACTORY as ECHO
from rollart.conformance.echo import question
from rollart.ports.factory import load
from rollart.ports.worker import Advance
from rollart.sim.faults import FACTORY, MESSAGES, Fault, FaultyWorker, Injections, Killed, Kind, with_faults
from rollart.sim.loop import run_virtual
from rollart.sim.lossy import LinkFaults, LossyRuntime
from rollart.sim.store import SimStore
from rollart.types.errors import RuntimeLost
from rollart.types.ids import ClaimId, RequestId, TrajectoryId, WorkerId
from rollart.types.messages import (
    Add,
    EnvironmentFailed,
    FinishReason,
    Observed,
    PrefixMiss,
    Refused,
    Reset,
    RewardInfo,
    Role,
    Save,
    Saved,
    SaveFailed,
    Scored,
    ScoreFailed,
    ScoreRequest,
    Stage,
    Staged,
    StageFailed,
    Step,
    Train,
    Trained,
    TurnDone,
    TurnUsage,
    Update,
    Updated,
    WorkerCommand,
    WorkerEvent,
    WorkerInfo,
)
from rollart.types.placement import Node
from rollart.types.tokens import Generated, Segment
from rollart.types.versions import Version

NAME = "engine/fast/0"
ONE = Version(0, 1)


class Answering:
    """A worker that answers at once, by the settings' `answers` or its defaults, and logs its commands.

    It wakes every `beat_s`, so that time passes for it although nothing is asked.
    """

    def __init__(self, settings: Mapping[str, Any], _wake: Callable[[], None]) -> None:
        self._settings = settings
        self._commands: list[WorkerCommand] = []
        self._log("built")

    def info(self) -> WorkerInfo:
        return RewardInfo(slots=1)

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:
        commands, self._commands = self._commands, []
        events: list[WorkerEvent] = []
        for command in commands:
            self._log(command)
            answer = self._settings.get("answers", {}).get(type(command), usual_answer)(command)
            events += [] if answer is None else [answer]
        beat_s = self._settings.get("beat_s")
        return Advance(events, None if beat_s is None else now + beat_s)

    def close(self) -> None:
        self._log("closed")

    def _log(self, what: Any) -> None:
        self._settings["log"].append(what)


def usual_answer(command: Any) -> WorkerEvent:
    match command:
        case Add(request):
            return TurnDone(request, Generated(Segment(0, None), None, ()), FinishReason.STOP, TurnUsage())
        case Reset(episode):
            return Observed(episode, 0, Segment(1, None))
        case Step(episode, turn):
            return Observed(episode, turn, Segment(1, None), reward=1.0)
        case ScoreRequest(key):
            return Scored(key, (1.0,))
        case Stage(manifest):
            return Staged(manifest.version)
        case Update(version):
            return Updated(version)
        case Train(claim, version):
            return Trained(claim, version, {})
        case Save(version):
            return Saved(version)
    raise AssertionError(command)


class Rig:
    """One faulty worker after another, of one spec, and everything that was injected in them."""

    def __init__(self, *faults: Fault, name: str = NAME, seed: int = 0, **settings: Any) -> None:
        self.injections = Injections()
        self.log: list[Any] = []
        path = f"{Answering.__module__}:Answering"
        self._factory, self._settings = with_faults(
            name, path, {"log": self.log} | settings, faults, self.injections, seed
        )
        self.faults = faults

    def start(self) -> Driver:
        """The next incarnation."""
        driver = Driver(load(self._factory)(self._settings, lambda: None))
        driver.send()
        return driver

    @property
    def rows(self) -> dict[int, int]:
        return dict(self.injections.rows)


def score(key: int) -> ScoreRequest:
    return question(str(key))


def step(turn: int, episode: int = 0) -> Step:
    return Step(TrajectoryId(episode), turn, Segment(1, None))


def stay_silent(_command: Any) -> None:
    return None


def test_without_faults_it_is_the_worker_inside() -> None:
    rig = Rig(beat_s=2.0)
    driver = rig.start()
    assert isinstance(driver.worker, FaultyWorker)
    assert driver.worker.info() == RewardInfo(slots=1)
    assert driver.wake_at == 2.0
    assert driver.send(score(1), score(2)) == [Scored("1", (1.0,)), Scored("2", (1.0,))]
    driver.worker.close()
    assert rig.log == ["built", score(1), score(2), "closed"]
    assert rig.rows == {}


# --- kill -----------------------------------------------------------------------------------------------------------


def test_an_idle_engine_is_killed_idle() -> None:
    rig = Rig(Fault(1, "kill", NAME, at_s=5.0), answers={Add: stay_silent})
    driver = rig.start()
    assert driver.wake_at == 5.0, "it has to be driven for it to happen"
    driver.run(until=4.9)
    with pytest.raises(Killed):
        driver.run()
    assert (driver.now, rig.rows) == (5.0, {1: 1})


def test_an_engine_at_work_is_not_killed_as_an_idle_one() -> None:
    rig = Rig(Fault(1, "kill", NAME, at_s=5.0), answers={Add: stay_silent}, beat_s=1.0)
    driver = rig.start()
    driver.send(add(1, 1))
    driver.run(until=20.0)
    assert rig.rows == {}


def test_an_engine_at_work_is_killed_at_work() -> None:
    rig = Rig(Fault(2, "kill", NAME, at_s=5.0), answers={Add: stay_silent}, beat_s=1.0)
    driver = rig.start()
    driver.run(until=10.0)
    assert rig.rows == {}, "an idle one is left alone"
    driver.send(add(1, 1))
    with pytest.raises(Killed):
        driver.run(until=12.0)
    assert rig.rows == {2: 1}


@pytest.mark.parametrize(
    "ends",
    [
        usual_answer,
        lambda command: PrefixMiss(command.request),
        lambda command: Refused(command.request, "too long"),
    ],
    ids=["done", "prefix-miss", "refused"],
)
def test_an_engine_whose_requests_have_ended_is_idle(ends: Callable[[Any], WorkerEvent]) -> None:
    kill_busy, kill_idle = Fault(2, "kill", NAME, at_s=5.0), Fault(1, "kill", NAME, at_s=6.0)
    rig = Rig(kill_busy, kill_idle, answers={Add: ends}, beat_s=1.0)
    driver = rig.start()
    driver.send(add(1, 1), add(2, 2))
    with pytest.raises(Killed):
        driver.run(until=10.0)
    assert rig.rows == {1: 1}


def test_a_request_that_is_sent_twice_is_one() -> None:
    """An engine ends it once, however often it was asked."""
    answers = {Add: stay_silent, Update: lambda _: PrefixMiss(RequestId(1))}
    rig = Rig(Fault(1, "kill", NAME, at_s=5.0), answers=answers)
    driver = rig.start()
    driver.send(add(1, 1), add(1, 1), Update(ONE))
    with pytest.raises(Killed):
        driver.run()


def test_a_command_kills_before_it_is_heard() -> None:
    rig = Rig(Fault(16, "kill", NAME, on="Save"))
    driver = rig.start()
    with pytest.raises(Killed, match="Save"):
        driver.send(Save(ONE))
    assert rig.log == ["built"]
    assert rig.rows == {16: 1}


def test_an_answer_kills_after_the_work_and_is_never_told() -> None:
    rig = Rig(Fault(15, "kill", NAME, on="Trained"))
    driver = rig.start()
    train = Train(ClaimId(0), ONE, ())
    with pytest.raises(Killed, match="Trained"):
        driver.send(train)
    assert rig.log == ["built", train]
    assert driver.events(Trained) == []
    assert rig.rows == {15: 1}


def test_a_worker_is_killed_some_time_after_an_answer() -> None:
    rig = Rig(Fault(20, "kill", NAME, on="Updated", for_s=3.0))
    driver = rig.start()
    driver.now = 10.0
    assert driver.send(Update(ONE)) == [Updated(ONE)], "the answer is reported"
    assert driver.wake_at == 13.0
    assert driver.send(score(1)) == [Scored("1", (1.0,))], "and it works on until then"
    with pytest.raises(Killed):
        driver.run()
    assert (driver.now, rig.rows) == (13.0, {20: 1})


# --- freeze ---------------------------------------------------------------------------------------------------------


def test_a_frozen_engine_says_nothing_and_comes_back() -> None:
    rig = Rig(Fault(3, "freeze", NAME, at_s=5.0, for_s=20.0), answers={Add: stay_silent}, beat_s=1.0)
    driver = rig.start()
    driver.send(add(1, 1))
    driver.run(until=5.0)
    assert rig.rows == {3: 1}
    assert driver.wake_at == 25.0
    driver.now = 7.0
    assert driver.send(score(1)) == []
    assert score(1) not in rig.log, "its process does not run"
    driver.run(until=24.9)
    assert driver.events(Scored) == []
    driver.run(until=25.0)
    assert driver.log[-1] == (25.0, Scored("1", (1.0,)))
    assert rig.rows == {3: 1}


def test_a_freeze_without_an_end_lasts() -> None:
    rig = Rig(Fault(3, "freeze", NAME, at_s=5.0), answers={Add: stay_silent}, beat_s=1.0)
    driver = rig.start()
    driver.send(add(1, 1))
    driver.run(until=5.0)
    assert driver.wake_at is None, "nothing will ever come of it"
    driver.now = 1e6
    assert driver.send(score(1)) == []


def test_an_idle_engine_does_not_freeze() -> None:
    rig = Rig(Fault(3, "freeze", NAME, at_s=5.0), beat_s=1.0)
    rig.start().run(until=30.0)
    assert rig.rows == {}


# --- hang, double, late ---------------------------------------------------------------------------------------------


def test_a_command_hangs() -> None:
    rig = Rig(Fault(12, "hang", NAME, on="ScoreRequest", skip=1))
    driver = rig.start()
    assert driver.send(score(1), score(2), score(3)) == [Scored("1", (1.0,)), Scored("3", (1.0,))]
    assert score(2) not in rig.log
    assert rig.rows == {12: 1}


def test_an_answer_hangs() -> None:
    rig = Rig(Fault(17, "hang", NAME, on="Observed"))
    driver = rig.start()
    assert driver.send(step(1)) == []
    assert step(1) in rig.log, "the work was done"
    assert driver.send(step(2)) == [Observed(TrajectoryId(0), 2, Segment(1, None), reward=1.0)]
    assert rig.rows == {17: 1}


def test_an_answer_comes_twice() -> None:
    rig = Rig(Fault(18, "double", NAME, on="Scored"))
    driver = rig.start()
    assert driver.send(score(1), score(2)) == [Scored("1", (1.0,)), Scored("1", (1.0,)), Scored("2", (1.0,))]
    assert rig.rows == {18: 1}


def test_an_answer_comes_late() -> None:
    rig = Rig(Fault(20, "late", NAME, on="Updated", for_s=3.0))
    driver = rig.start()
    driver.now = 10.0
    assert driver.send(Update(ONE), score(1)) == [Scored("1", (1.0,))]
    assert driver.wake_at == 13.0
    assert driver.send(Update(Version(0, 2))) == [Updated(Version(0, 2))], "only one of them is late"
    driver.run()
    assert driver.log[-1] == (13.0, Updated(ONE))
    assert rig.rows == {20: 1}


def test_late_answers_keep_their_order() -> None:
    rig = Rig(Fault(19, "late", NAME, on="Scored", for_s=3.0, limit=5))
    driver = rig.start()
    driver.send(*(score(index) for index in range(5)))
    assert [event.key for _, event in driver.run() if isinstance(event, Scored)] == list("01234")


# --- what one role alone can suffer ---------------------------------------------------------------------------------


def test_a_reward_fails_for_a_while() -> None:
    rig = Rig(Fault(13, "fail", NAME, on="ScoreRequest", limit=2))
    driver = rig.start()
    (failed,) = driver.send(score(1))
    assert isinstance(failed, ScoreFailed)
    assert (failed.key, failed.retry) == ("1", True)
    assert isinstance(driver.send(score(1))[0], ScoreFailed)
    assert driver.send(score(1)) == [Scored("1", (1.0,))]
    assert rig.rows == {13: 2}


def test_a_reward_answers_every_kind_of_nonsense() -> None:
    rig = Rig(Fault(14, "nonsense", NAME, on="Scored", limit=3))
    driver = rig.start()
    values = [event.values[0] for event in driver.send(*(score(index) for index in range(4)))]  # type: ignore[union-attr]
    assert {str(value) for value in values[:3]} == {"nan", "inf", "ten"}
    assert values[3] == 1.0
    assert rig.rows == {14: 3}


def test_out_of_memory_is_the_agents_result_or_the_hosts_failure() -> None:
    rig = Rig(Fault(9, "limit", NAME, on="Observed", limit=2))
    driver = rig.start()
    agents, hosts, after = driver.send(step(1), step(2), step(3))
    assert agents == Observed(TrajectoryId(0), 1, Segment(1, None), reward=0.0, done=True, truncated=True)
    assert isinstance(hosts, EnvironmentFailed)
    assert (hosts.turn, "memory" in hosts.reason) == (2, True)
    assert after == Observed(TrajectoryId(0), 3, Segment(1, None), reward=1.0)
    assert rig.rows == {9: 2}


def test_a_reset_runs_into_no_limit_and_is_not_counted() -> None:
    rig = Rig(Fault(9, "limit", NAME, on="Observed"))
    driver = rig.start()
    driver.send(Reset(TrajectoryId(0), 0, prompt(1), 0))
    assert rig.rows == {}, "nothing was injected"
    (first,) = driver.send(step(1))
    assert isinstance(first, Observed)
    assert first.truncated
    assert rig.rows == {9: 1}


def test_a_full_disk_fails_the_save_and_not_the_trainer() -> None:
    rig = Rig(Fault(16, "full_disk", NAME, on="Save"))
    driver = rig.start()
    (failed,) = driver.send(Save(ONE))
    assert isinstance(failed, SaveFailed)
    assert "full" in failed.reason
    assert Save(ONE) not in rig.log
    assert driver.send(Save(ONE)) == [Saved(ONE)]
    assert rig.rows == {16: 1}


def test_an_engine_that_is_absent_does_not_come_up() -> None:
    rig = Rig(Fault(5, "absent", NAME))
    with pytest.raises(Killed):
        rig.start()
    assert rig.log == [], "nothing was built"
    assert rig.start().send(score(1)) == [Scored("1", (1.0,))]
    assert rig.rows == {5: 1}


def test_a_damaged_tensor_is_refused_by_the_engine() -> None:
    store, injections = SimStore(), Injections()
    manifest = publish(store, ONE, nominal_bytes=0)
    fault = Fault(21, "corrupt", NAME, on="Stage")
    _, settings = with_faults(NAME, "rollart.sim.engine:SimEngine", engine_settings(store), [fault], injections, seed=0)
    driver = Driver(FaultyWorker(settings, lambda: None))
    driver.send(Stage(manifest))
    driver.run()
    assert [event.version for event in driver.events(StageFailed)] == [ONE]
    assert driver.events(Staged) == []
    driver.send(Stage(manifest))
    driver.run()
    assert driver.events(Staged) == [Staged(ONE)], "the store is whole, so staging it again works"
    assert dict(injections.rows) == {21: 1}


def test_an_environment_is_silently_a_blank_one() -> None:
    injections = Injections()
    settings = {"task": "game", "profile": profile(reset_s=1.0, step_s=1.0, turns=6), "slots": 2, "seed": 2}
    fault = Fault(8, "blank", "environment/", at_s=5.0)
    path = "rollart.sim.environment:SimEnvironments"
    _, faulty = with_faults("environment/game/0", path, settings, [fault], injections, seed=0)
    driver = Driver(FaultyWorker(faulty, lambda: None))
    driver.send(Reset(TrajectoryId(0), 0, prompt(1), 0))
    driver.run(until=4.0)
    assert len(driver.events(Observed)) == 1
    driver.run(until=5.0)
    assert len(driver.log) == 1, "no event"
    driver.send(step(1))
    driver.run()
    (failed,) = driver.events(EnvironmentFailed)
    assert "not open" in failed.reason
    driver.send(Reset(TrajectoryId(1), 0, prompt(1), 0))
    driver.run()
    assert driver.events(Observed)[-1].episode == 1, "a new episode finds it well"
    assert dict(injections.rows) == {8: 1}


def test_every_worker_inside_is_closed_once() -> None:
    rig = Rig(Fault(8, "blank", NAME, at_s=5.0))
    driver = rig.start()
    driver.run(until=5.0)
    driver.worker.close()
    assert rig.log == ["built", "closed", "built", "closed"]


# --- whom, when, how often ------------------------------------------------------------------------------------------


def test_a_fault_hits_the_workers_of_its_target() -> None:
    faults = [Fault(13, "double", target, on="Scored") for target in ("reward/", "reward/1", "engine/")]

    def targets(name: str) -> list[str]:
        _, settings = with_faults(name, "m:f", {}, faults, Injections(), 0)
        return [fault.target for _, fault in settings["faults"]]

    assert targets("reward/1") == ["reward/", "reward/1"]
    assert targets("reward/10") == ["reward/"]
    assert targets("engine/fast/0") == ["engine/"]


def test_the_first_ones_are_spared_and_then_so_many_are_hit() -> None:
    rig = Rig(Fault(13, "double", NAME, on="Scored", skip=2, limit=3))
    driver = rig.start()
    assert [len(driver.send(score(index))) for index in range(7)] == [1, 1, 2, 2, 2, 1, 1]
    assert rig.rows == {13: 3}


def test_a_fault_hits_as_many_incarnations_as_it_says() -> None:
    rig = Rig(Fault(20, "kill", NAME, on="Update", limit=10, incarnations=2))
    for _ in range(2):
        with pytest.raises(Killed):
            rig.start().send(Update(ONE))
    assert rig.start().send(Update(ONE)) == [Updated(ONE)]
    assert rig.rows == {20: 2}


def test_incarnations_share_the_limit() -> None:
    rig = Rig(Fault(20, "kill", NAME, on="Update", limit=1, incarnations=10))
    with pytest.raises(Killed):
        rig.start().send(Update(ONE))
    assert rig.start().send(Update(ONE)) == [Updated(ONE)]


def test_a_share_is_hit_and_the_seed_says_which() -> None:
    def hits(seed: int) -> list[int]:
        rig = Rig(Fault(12, "hang", NAME, on="ScoreRequest", share=0.3, limit=1000), seed=seed)
        answered = {event.key for event in rig.start().send(*(score(index) for index in range(400)))}  # type: ignore[union-attr]
        missing = [index for index in range(400) if str(index) not in answered]
        assert rig.rows == {12: len(missing)}
        return missing

    first = hits(1)
    assert 80 < len(first) < 160
    assert hits(1) == first
    assert hits(2) != first


def test_one_fault_may_wait_for_another() -> None:
    kill = Fault(4, "kill", NAME, on="Update", skip=1, limit=10, incarnations=10)
    absent = Fault(4, "absent", NAME, once_struck=4, limit=10, incarnations=10)
    rig = Rig(kill, absent)
    driver = rig.start()
    driver.send(Update(ONE))
    with pytest.raises(Killed, match="Update"):
        driver.send(Update(ONE))
    for _ in range(3):
        with pytest.raises(Killed, match="come up"):
            rig.start()
    assert rig.rows == {4: 4}


def test_faults_are_counted_by_row() -> None:
    rig = Rig(
        Fault(13, "double", NAME, on="Scored", limit=2),
        Fault(13, "fail", NAME, on="ScoreRequest", skip=3, limit=1),
        Fault(16, "full_disk", NAME, on="Save", limit=5),
    )
    driver = rig.start()
    driver.send(*(score(index) for index in range(5)), Save(ONE), Save(ONE))
    assert rig.rows == {13: 3, 16: 2}
    assert rig.injections.struck == Counter({0: 2, 1: 1, 2: 2})


def test_every_kind_and_every_message_is_tried_here() -> None:
    """A new kind of fault, or a message to trigger one, comes with a test: this list is its reminder."""
    assert set(get_args(Kind)) == {
        "absent", "blank", "corrupt", "double", "fail", "freeze", "full_disk", "hang", "kill", "late", "limit",
        "nonsense",
    }  # fmt: skip
    assert {name for name, message in MESSAGES.items() if message.__name__ == name} == set(MESSAGES)
    assert load(FACTORY) is FaultyWorker


# --- row 24: the link -----------------------------------------------------------------------------------------------


class RecordingListener:
    """Records all callbacks of a runtime, with their times."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, str, Any]] = []

    def waits(self, worker: WorkerId, why: str) -> None:
        raise NotImplementedError

    def placed(self, worker: WorkerId, node: str, why: str) -> None:
        raise NotImplementedError

    def leaves(self, worker: WorkerId, why: str) -> None:
        raise NotImplementedError

    def nodes_seen(self, nodes: Sequence[Node]) -> None:
        raise NotImplementedError

    def joined(self, worker: WorkerId, info: WorkerInfo) -> None:  # noqa: ARG002
        self._record("joined", worker)

    def events(self, worker: WorkerId, events: Sequence[WorkerEvent]) -> None:  # noqa: ARG002
        for event in events:
            self._record("event", event)

    def died(self, worker: WorkerId, reason: str) -> None:  # noqa: ARG002
        self._record("died", reason)

    def failed(self, error: RuntimeLost) -> None:
        self._record("failed", error)

    def _record(self, what: str, details: Any) -> None:
        self.calls.append((asyncio.get_running_loop().time(), what, details))


def over_link(faults: LinkFaults, questions: int) -> tuple[RecordingListener, Injections]:
    """One question after another, a second apart."""
    listener, injections = RecordingListener(), Injections()

    async def main() -> None:
        runtime = LossyRuntime(faults, injections)
        runtime.listen(listener)
        runtime.spawn(WorkerId("echo"), Role.REWARD, ECHO, {})
        for index in range(questions):
            runtime.post(WorkerId("echo"), [question(f"echo/{index}")])
            await asyncio.sleep(1.0)
        await asyncio.sleep(60.0)
        await runtime.close()

    run_virtual(main())
    return listener, injections


def test_a_perfect_link_injects_nothing() -> None:
    listener, injections = over_link(LinkFaults(seed=1), 20)
    assert [details.key for _, what, details in listener.calls if what == "event"] == [f"echo/{n}" for n in range(20)]
    assert injections.rows[24] == 0


def test_a_bad_link_delays_and_loses_nothing() -> None:
    faults = LinkFaults(seed=1, loss=0.3, double=0.2, delay_s=0.3, cut_s=5.0, cut_every_s=20.0)
    listener, injections = over_link(faults, 60)
    assert [details.key for _, what, details in listener.calls if what == "event"] == [f"echo/{n}" for n in range(60)]
    assert injections.rows[24] > 20


def test_a_link_that_stays_silent_is_a_death() -> None:
    listener, injections = over_link(LinkFaults(seed=1, loss=1.0, silent_s=20.0), 5)
    assert [what for _, what, _ in listener.calls] == ["joined", "died"]
    at, _, reason = listener.calls[-1]
    assert math.isclose(at, 20.0)
    assert "silent for 20 s" in reason
    assert injections.rows[24] > 0
