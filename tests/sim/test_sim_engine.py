"""The simulated engine: what it costs, what it keeps, and that no token is lost or doubled whatever is sent to it."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_parts import DEVICE, TASK, Driver, add, engine_settings, profile, publish, serving, update

from rollart.config.injection import Slowdown
from rollart.ports.factory import load
from rollart.sim.engine import SimEngine
from rollart.sim.hardware import TINY, Roofline
from rollart.sim.store import SimStore
from rollart.sim.workload import Workload
from rollart.types.errors import InvariantBroken
from rollart.types.ids import RequestId, TrajectoryId
from rollart.types.messages import (
    Abort,
    EndSession,
    FinishReason,
    PrefixMiss,
    Progress,
    Refused,
    Resume,
    Stage,
    Staged,
    StageFailed,
    Suspend,
    TaskWork,
    TurnDone,
    TurnUsage,
    Update,
    Updated,
)
from rollart.types.tokens import Generated
from rollart.types.versions import Version

SMALL = DEVICE.model_copy(update={"hbm_gb": 0.0256})
"""Room for about 1,500 tokens of KV beside the tiny model."""
FIXED = {"tasks": {TASK: profile(answer_tokens=100)}}


def turn(driver: Driver, request: int) -> tuple[float, TurnDone, Generated]:
    """When a request ended, how, and all its tokens."""
    parts = [part for event in driver.events(Progress) for id, part in event.parts if id == request]
    (at, done), *more = [(at, event) for at, event in driver.log if _ends(event, request)]
    assert not more
    assert isinstance(done, TurnDone)
    whole = done.generated
    for part in reversed(parts):
        whole = part.then(whole)
    return at, done, whole


def _ends(event: object, request: int) -> bool:
    return isinstance(event, TurnDone | PrefixMiss | Refused) and event.request == request


# --- time -----------------------------------------------------------------------------------------------------------


def test_one_request_takes_its_prefill_and_its_steps() -> None:
    driver, _ = serving(**FIXED)
    driver.send(add(1, 1, new=300))
    driver.run()
    at, done, whole = turn(driver, 1)
    roofline = Roofline(DEVICE, TINY)
    expected = roofline.prefill_s(300, 0) + sum(roofline.decode_step_s(1, 300 + step) for step in range(100))
    assert at == pytest.approx(expected, rel=1e-9)
    assert done.finish is FinishReason.STOP
    assert done.usage == TurnUsage(prefilled=300, cached=0, recomputed=0)
    assert whole.tokens.length == 100


@given(st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 400), st.integers(1, 300)), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_ends_are_those_of_an_engine_that_counts_every_token(arrivals: list[tuple[float, int, int]]) -> None:
    # Prefill is quick here: this engine takes an arrival in mid-step, the one below between two steps.
    hardware = DEVICE.model_copy(update={"tflops": 20.0})
    driver, _ = serving(hardware=hardware, slots=3, tasks={TASK: profile(answer_tokens=100_000)})
    now, sent = 0.0, []
    for index, (gap, new, length) in enumerate(arrivals):
        now += gap
        driver.run(until=now)
        driver.send(add(index + 1, index + 1, new=new, max_tokens=length))
        sent.append((now, new, length))
    driver.run()
    for index, expected in enumerate(_token_by_token(Roofline(hardware, TINY), sent, slots=3)):
        # A stretch that is cut was timed by the middle of the whole one: a few per mille, never a drift.
        assert turn(driver, index + 1)[0] == pytest.approx(expected, rel=0.01, abs=0.006)


def _token_by_token(roofline: Roofline, sent: list[tuple[float, int, int]], slots: int) -> list[float]:
    """The same engine with a loop over tokens, and steps that an arrival does not cut."""
    ends = [math.nan] * len(sent)
    waiting = list(range(len(sent)))
    running: dict[int, int] = {}
    now = 0.0
    while waiting or running:
        if not running:
            now = max(now, sent[waiting[0]][0])
        while waiting and len(running) < slots and sent[waiting[0]][0] <= now:
            index = waiting.pop(0)
            now += roofline.prefill_s(sent[index][1], 0)
            running[index] = 0
        kv = sum(sent[index][1] + done for index, done in running.items())
        now += roofline.decode_step_s(len(running), kv)
        for index in list(running):
            running[index] += 1
            if running[index] == sent[index][2]:
                ends[index] = now
                del running[index]
    return ends


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_company_never_makes_a_request_faster(others: list[int], length: int) -> None:
    ends = []
    for company in ([], others):
        driver, _ = serving(slots=8, tasks={TASK: profile(answer_tokens=100_000)})
        driver.send(add(1, 1, max_tokens=length), *(add(i + 2, i + 2, max_tokens=n) for i, n in enumerate(company)))
        driver.run()
        ends.append(turn(driver, 1)[0])
    assert ends[1] >= ends[0]


def test_interruptions_cost_no_time() -> None:
    ends = []
    for pokes in (0, 97):
        driver, _ = serving(**FIXED)
        driver.send(add(1, 1))
        for poke in range(pokes):
            driver.run(until=0.0005 * (poke + 1))
            driver.send(Abort(RequestId(999)))
        driver.run()
        at, _, whole = turn(driver, 1)
        assert whole.tokens.length == 100
        ends.append(at)
    # Not exactly equal: after a cut the rest is timed by its own middle.
    assert ends[1] == pytest.approx(ends[0], rel=1e-3)


def test_suspension_moves_the_end_by_its_length() -> None:
    ends = []
    for pause in (0.0, 7.0):
        driver, _ = serving(**FIXED)
        driver.send(add(1, 1, new=300))
        driver.run(until=0.03)
        driver.send(Suspend())
        driver.run(until=0.03 + pause)
        assert not driver.events(TurnDone)
        driver.send(Resume())
        driver.run()
        ends.append(turn(driver, 1)[0])
    assert ends[1] - ends[0] == pytest.approx(7.0)


def test_a_late_call_gives_everything_that_was_due() -> None:
    driver, _ = serving(**FIXED, slots=1)
    driver.send(*(add(index, index) for index in range(1, 5)))
    driver.now = 100.0
    driver.send()
    assert [event.request for event in driver.events(TurnDone)] == [1, 2, 3, 4]
    assert driver.wake_at is None


def test_time_does_not_go_backwards() -> None:
    driver, _ = serving()
    driver.run(until=5.0)
    driver.send()
    driver.now = 4.0
    with pytest.raises(InvariantBroken):
        driver.send()


# --- sessions and KV ------------------------------------------------------------------------------------------------


def test_a_known_prefix_is_not_prefilled_again() -> None:
    driver, _ = serving(**FIXED)
    driver.send(add(1, 1, new=1000))
    driver.run()
    start = driver.now
    driver.send(add(2, 1, prefix=1100, new=10))
    driver.run()
    at, done, _ = turn(driver, 2)
    assert done.usage == TurnUsage(prefilled=10, cached=1100, recomputed=0)
    roofline = Roofline(DEVICE, TINY)
    steps = sum(roofline.decode_step_s(1, 1110 + step) for step in range(100))
    assert at - start == pytest.approx(roofline.prefill_s(10, 1100) + steps, rel=1e-9)


def test_the_least_recently_used_prefix_gives_way() -> None:
    driver, _ = serving(hardware=SMALL, tasks={TASK: profile(answer_tokens=1)})
    for session in (1, 2, 3):
        driver.send(add(session, session, new=399))
        driver.run()
    driver.send(add(4, 1, prefix=400, new=9))
    driver.run()
    assert turn(driver, 4)[1].usage.cached == 400
    driver.send(add(5, 5, new=599))
    driver.run()
    assert driver.send(add(6, 2, prefix=400, new=9)) == [PrefixMiss(RequestId(6))]
    driver.send(add(7, 1, prefix=410, new=9))
    driver.run()
    assert turn(driver, 7)[1].usage.cached == 410


def test_a_prefix_evicted_in_the_queue_is_missed_late() -> None:
    driver, _ = serving(hardware=SMALL, slots=1, **FIXED)
    driver.send(add(1, 1, new=300))
    driver.run()
    driver.send(add(2, 2, new=1200), add(3, 1, prefix=400, new=5))
    driver.run()
    assert [event.request for event in driver.events(PrefixMiss)] == [3]
    driver.send(add(4, 1, new=405))
    driver.run()
    assert driver.events(TurnDone)[-1].usage == TurnUsage(prefilled=405, cached=0, recomputed=0)


def test_without_room_requests_wait_in_order() -> None:
    driver, _ = serving(hardware=SMALL, slots=8, **FIXED)
    driver.send(*(add(index, index, new=600) for index in (1, 2, 3)), add(4, 4, new=10))
    driver.run()
    ends = [turn(driver, index)[0] for index in (1, 2, 3, 4)]
    assert ends[0] == ends[1] < ends[2] == ends[3], "the small one does not overtake the one that waits for room"


def test_what_can_never_fit_is_refused() -> None:
    driver, _ = serving(hardware=SMALL)
    worker = driver.worker
    assert isinstance(worker, SimEngine)
    room = worker.info().max_context
    assert room == worker.kv_capacity_tokens < 4_000
    (refused,) = driver.send(add(1, 1, new=room))
    assert isinstance(refused, Refused)
    driver.send(add(2, 2, new=room - 1))
    driver.run()
    _, done, whole = turn(driver, 2)
    assert (done.finish, whole.tokens.length) == (FinishReason.LENGTH, 1)


def test_an_aborted_prefill_leaves_nothing_to_go_on_from() -> None:
    driver, _ = serving(**FIXED)
    driver.send(add(1, 1, new=1000))
    (done,) = driver.send(Abort(RequestId(1)))
    assert isinstance(done, TurnDone)
    assert done.generated.tokens.length == 0
    assert driver.send(add(2, 1, prefix=1000, new=1)) == [PrefixMiss(RequestId(2))]


# --- versions -------------------------------------------------------------------------------------------------------


def test_an_update_recomputes_what_is_in_flight() -> None:
    ends = {}
    for kv_on_update in ("recompute", "keep"):
        driver, store = serving(kv_on_update=kv_on_update, **FIXED)
        driver.send(add(1, 1, new=1000))
        driver.run(until=0.45)
        update(driver, store, Version(0, 1))
        driver.run()
        at, done, whole = turn(driver, 1)
        assert [run.version for run in whole.runs] == [Version(0, 0), Version(0, 1)]
        before = whole.runs[0].length
        assert done.usage.recomputed == (1000 + before if kv_on_update == "recompute" else 0)
        ends[kv_on_update] = at
    recompute_s = Roofline(DEVICE, TINY).prefill_s(1000 + before, 0)
    assert ends["recompute"] - ends["keep"] == pytest.approx(recompute_s, rel=1e-6)


def test_an_update_voids_idle_sessions_without_a_miss() -> None:
    driver, store = serving(**FIXED)
    driver.send(add(1, 1, new=200))
    driver.run()
    update(driver, store, Version(0, 1))
    assert driver.worker.kv_tokens == 0  # type: ignore[attr-defined]
    driver.send(add(2, 1, prefix=300, new=10))
    driver.run()
    assert turn(driver, 2)[1].usage == TurnUsage(prefilled=10, cached=0, recomputed=300)
    driver.send(add(3, 1, prefix=410, new=10))
    driver.run()
    assert turn(driver, 3)[1].usage == TurnUsage(prefilled=10, cached=410, recomputed=0)


def test_an_update_in_mid_prefill_recomputes_what_was_prefilled() -> None:
    driver, store = serving(**FIXED)
    driver.send(add(1, 1, new=1000), add(2, 2, new=1000))
    driver.run(until=0.5 * Roofline(DEVICE, TINY).prefill_s(1000, 0))
    update(driver, store, Version(0, 1))
    driver.run()
    assert [turn(driver, index)[1].usage.recomputed for index in (1, 2)] == [500, 0]


def test_a_request_that_computed_nothing_before_the_update_recomputes_nothing() -> None:
    driver, store = serving(slots=1, **FIXED)
    driver.send(add(1, 1), add(2, 2))
    driver.run(until=0.02)
    update(driver, store, Version(0, 1))
    driver.run()
    assert turn(driver, 1)[1].usage.recomputed > 0
    assert turn(driver, 2)[1].usage.recomputed == 0


def test_an_abort_in_mid_recompute_keeps_the_session_void() -> None:
    driver, store = serving(**FIXED)
    driver.send(add(1, 1, new=1000))
    driver.run(until=0.45)
    update(driver, store, Version(0, 1))
    driver.send(Abort(RequestId(1)))
    sampled = turn(driver, 1)[2].tokens.length
    driver.send(add(2, 1, prefix=1000 + sampled, new=5))
    driver.run()
    assert turn(driver, 2)[1].usage.recomputed == 1000 + sampled


def test_staging_takes_the_transfer_and_is_verified_at_its_end() -> None:
    driver, store = serving(pull_gb_s=2.0)
    driver.send(Stage(publish(store, Version(0, 1), nominal_bytes=3_000_000_000)))
    driver.send(Stage(publish(store, Version(0, 2), nominal_bytes=1_000_000_000)))
    driver.run(until=1.0)
    store.corrupt(Version(0, 2), 1)
    driver.run()
    (first_at, first), (second_at, second) = driver.log[-2:]
    assert (first_at, first) == (1.5, Staged(Version(0, 1)))
    assert second_at == pytest.approx(2.0)
    assert isinstance(second, StageFailed)
    assert "digest" in second.reason
    (refused,) = driver.send(Update(Version(0, 2)))
    assert isinstance(refused, StageFailed)
    assert driver.send(Update(Version(0, 1))) == [Updated(Version(0, 1))]


# --- progress -------------------------------------------------------------------------------------------------------


def test_progress_tells_whole_tokens_on_its_beat() -> None:
    driver, _ = serving(progress_interval_s=0.01, **FIXED)
    driver.send(add(1, 1))
    driver.run()
    beats = [at for at, event in driver.log if isinstance(event, Progress)]
    assert beats == pytest.approx([0.01 * (index + 1) for index in range(len(beats))])
    assert len(beats) == int(turn(driver, 1)[0] / 0.01)
    assert sum(event.steps for event in driver.events(Progress)) <= 100
    assert all(part.tokens.length for event in driver.events(Progress) for _, part in event.parts)


def test_a_suspended_engine_is_silent() -> None:
    driver, _ = serving(**FIXED)
    driver.send(add(1, 1), Suspend())
    assert driver.wake_at is None


# --- whatever is sent -----------------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.floats(0.0, 0.2)),
        st.tuples(st.just("turn"), st.integers(0, 7)),
        st.tuples(st.just("whole"), st.integers(0, 7)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("end"), st.integers(0, 7)),
        st.tuples(st.sampled_from(["suspend", "resume", "update", "again"]), st.just(0)),
    ),
    max_size=60,
)


class Controller:
    """Keeps the logs of sessions from reported tokens, and checks every event against what it sent."""

    def __init__(self, kv_on_update: str) -> None:
        self.driver, self.store = serving(hardware=SMALL, slots=3, kv_on_update=kv_on_update, progress_interval_s=0.02)
        self.seen = len(self.driver.log)
        self.workload = Workload(TASK, profile(), 11)
        self.adds: dict[int, Any] = {}
        self.reported: dict[int, int] = {}
        self.ended: dict[int, object] = {}
        self.aborted: set[int] = set()
        self.logs: dict[int, int] = {}
        self.busy: dict[int, int] = {}
        self.steps = 0
        self.version = Version(0, 0)
        self.last_version: dict[int, Version] = {}

    def act(self, kind: str, value: float) -> None:
        session = int(value) + 1
        if kind == "wait":
            self.driver.run(until=self.driver.now + value)
        elif kind in ("turn", "whole") and session not in self.busy:
            self._turn(session, kind == "turn")
        elif kind == "abort" and int(value) in self.adds:
            self.aborted.add(int(value))
            self.driver.send(Abort(RequestId(int(value))))
        elif kind == "end" and session not in self.busy:
            self.logs.pop(session, None)
            self.driver.send(EndSession(TrajectoryId(session)))
        elif kind == "suspend":
            self.driver.send(Suspend())
        elif kind == "resume":
            self.driver.send(Resume())
        elif kind == "again" and self.adds:
            last = self.adds[max(self.adds)]
            if not isinstance(self.ended.get(last.request), PrefixMiss | Refused):
                self.driver.send(last)
        elif kind == "update":
            self.steps += 1
            update(self.driver, self.store, Version(0, self.steps))
            self._handle_events()
            self.version = Version(0, self.steps)
        self._handle_events()

    def finish(self) -> None:
        self.driver.send(Resume())
        self.driver.run()
        self._handle_events()
        assert self.ended.keys() == self.adds.keys(), "every request ends"
        assert self.driver.wake_at is None
        for session in range(1, 9):
            self.driver.send(EndSession(TrajectoryId(session)))
        assert self.driver.worker.kv_tokens == 0  # type: ignore[attr-defined]
        assert self.driver.worker._batch.kv_tokens == 0  # type: ignore[attr-defined]

    def _turn(self, session: int, go_on: bool) -> None:
        request = len(self.adds) + 1
        prefix = self.logs.get(session, 0) if go_on else 0
        self.adds[request] = add(request, session, prefix=prefix, new=17 + request, max_tokens=120)
        self.reported[request] = 0
        self.busy[session] = request
        self.driver.send(self.adds[request])

    def _handle_events(self) -> None:
        worker = self.driver.worker
        assert isinstance(worker, SimEngine)
        assert 0 <= worker.kv_tokens <= worker.kv_capacity_tokens
        assert worker._batch.kv_tokens <= worker._cache.reserved_tokens
        log = self.driver.log
        assert [at for at, _ in log] == sorted(at for at, _ in log)
        for _, event in log[self.seen :]:
            if isinstance(event, Progress):
                for request, part in event.parts:
                    self._tokens(request, part)
            elif isinstance(event, TurnDone | PrefixMiss | Refused):
                self._end(event.request, event)
        self.seen = len(log)

    def _tokens(self, request: int, part: Generated) -> None:
        assert request not in self.ended, "no tokens are reported after the end of a request"
        assert sum(run.length for run in part.runs) == part.tokens.length
        for run in part.runs:
            assert run.length > 0
            assert self.last_version.get(request, run.version) <= run.version <= self.version
            self.last_version[request] = run.version
        self.reported[request] += part.tokens.length

    def _end(self, request: int, event: TurnDone | PrefixMiss | Refused) -> None:
        sent = self.adds[request]
        if isinstance(event, TurnDone):
            self._tokens(request, event.generated)
            context = sent.prefix_length + sent.new.length
            room = self.driver.worker.info().max_context - context  # type: ignore[union-attr]
            whole = min(self.workload.answer_tokens(request), 120, room)
            if event.finish is FinishReason.ABORTED:
                assert request in self.aborted
                assert self.reported[request] < whole
            else:
                assert self.reported[request] == whole
            self.logs[sent.session] = context + self.reported[request]
        else:
            self.logs.pop(sent.session, None)
        assert request not in self.ended, "a request ends once"
        self.ended[request] = event
        del self.busy[sent.session]


@given(ACTIONS, st.sampled_from(["recompute", "keep"]))
@settings(max_examples=150, deadline=None)
def test_no_token_is_lost_or_doubled(actions: list[tuple[str, float]], kv_on_update: str) -> None:
    logs = []
    for _ in range(2):
        controller = Controller(kv_on_update)
        for kind, value in actions:
            controller.act(kind, value)
        controller.finish()
        logs.append(controller.driver.log)
    assert logs[0] == logs[1], "two runs give the same events at the same times"


def test_an_engine_is_built_from_its_factory_path() -> None:
    worker = load("rollart.sim.engine:SimEngine")(engine_settings(SimStore()), lambda: None)
    assert worker.info().slots == 4


# --- prefixes that are lost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_a_share_of_prefixes_is_found_and_the_rest_is_computed_again(share: float) -> None:
    driver, _ = serving(prefix_hit=share, **FIXED)
    turns, found = 400, 0
    for number in range(turns):
        driver.send(add(2 * number + 1, session=1, new=20, seed=number + 1))
        driver.run()
        driver.send(add(2 * number + 2, session=1, prefix=120, new=10, seed=1_000 + number))
        driver.run()
        found += all(event.request != 2 * number + 2 for event in driver.events(PrefixMiss))
        driver.log.clear()
    assert found / turns == pytest.approx(share, abs=0.05)


def test_a_lost_prefix_is_sent_whole_and_then_kept_again() -> None:
    driver, _ = serving(prefix_hit=0.0, **FIXED)
    driver.send(add(1, session=1))
    driver.run()
    assert driver.send(add(2, session=1, prefix=120, new=10)) == [PrefixMiss(RequestId(2))]
    driver.send(add(3, session=1, new=130))
    driver.run()
    _, done, _ = turn(driver, 3)
    assert done.usage == TurnUsage(prefilled=130)


# --- work by task, and slow hardware --------------------------------------------------------------------------------


def work_of(driver: Driver) -> list[TaskWork]:
    return [work for event in driver.events(Progress) for work in event.work]


def test_reports_say_what_the_work_of_a_task_took() -> None:
    driver, _ = serving(measure=True, **FIXED)
    driver.send(*(add(number, number, new=300) for number in (1, 2, 3)))
    driver.run()
    driver.send(add(4, 4, new=300))  # the rest is reported with what comes later
    driver.run()
    work = work_of(driver)
    assert {each.task for each in work} == {TASK}
    assert sum(each.turns for each in work) >= 3
    tokens = sum(each.decode_tokens for each in work)
    assert tokens >= 300
    whole_s = driver.now
    spent_s = sum(each.prefill_s + each.decode_s for each in work)
    assert spent_s <= whole_s
    assert spent_s == pytest.approx(whole_s * tokens / 400, rel=0.1)
    prefilled = sum(each.prefill_tokens for each in work)
    assert prefilled in (900, 1200)
    steps = sum(each.decode_steps for each in work)
    assert 100 <= steps <= 200, "three requests share the steps of the first hundred"


def test_nothing_is_reported_that_nobody_asked_for() -> None:
    driver, _ = serving(**FIXED)
    driver.send(add(1, 1, new=300))
    driver.run()
    assert work_of(driver) == []


def test_slow_hardware_takes_longer_for_what_is_slow() -> None:
    roofline = Roofline(DEVICE, TINY)
    prefill_s = roofline.prefill_s(300, 0)
    decode_s = sum(roofline.decode_step_s(1, 300 + step) for step in range(100))
    for slowdown, expected in (
        (Slowdown(prefill=3.0), 3 * prefill_s + decode_s),
        (Slowdown(decode=2.0), prefill_s + 2 * decode_s),
        (Slowdown(prefill=9.0, from_s=1e6), prefill_s + decode_s),
    ):
        driver, _ = serving(inject=(slowdown,), **FIXED)
        driver.send(add(1, 1, new=300))
        driver.run(until=1000.0)
        assert turn(driver, 1)[0] == pytest.approx(expected, rel=1e-9)


def test_hardware_may_change_its_speed_in_the_middle_of_a_turn() -> None:
    plain, _ = serving(**FIXED)
    plain.send(add(1, 1, new=300))
    plain.run()
    whole_s = turn(plain, 1)[0]
    half_s = whole_s / 2
    driver, _ = serving(inject=(Slowdown(decode=3.0, from_s=half_s),), **FIXED)
    driver.send(add(1, 1, new=300))
    driver.run()
    assert turn(driver, 1)[0] == pytest.approx(half_s + 3 * half_s, rel=0.02)
