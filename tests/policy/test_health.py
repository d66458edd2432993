"""Health as a specification: back-off, quarantine, probation, giving up."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.policy.health import (
    ENGINE,
    ENVIRONMENT,
    REWARD,
    WORKER,
    Backoff,
    GiveUp,
    HealthBook,
    Limits,
    Quarantine,
    Retry,
)
from rollart.policy.seeds import uniform
from rollart.types.errors import RequestError

SLOT = "environment/frozenlake/0#3"
SMALL = Limits(
    backoff=Backoff(base_s=1.0, max_s=8.0),
    failures=3,
    window_s=100.0,
    quarantine=Backoff(base_s=50.0, max_s=75.0),
    quarantines=2,
)


def book_of(limits: Limits, seed: int = 0) -> HealthBook:
    return HealthBook(limits, seed)


def without_jitter(limits: Limits) -> HealthBook:
    backoff = msgspec.structs.replace(limits.backoff, jitter=0.0)
    return book_of(msgspec.structs.replace(limits, backoff=backoff))


# --- back-off -------------------------------------------------------------------------------------------------------


def test_delays_grow_by_the_factor_up_to_the_maximum() -> None:
    backoff = Backoff(base_s=0.5, factor=3.0, max_s=10.0)
    assert [backoff.delay(attempt) for attempt in (1, 2, 3, 4, 5)] == [0.5, 1.5, 4.5, 10.0, 10.0]


def test_the_usual_factor_is_two() -> None:
    assert Backoff(base_s=1.0, max_s=99.0).delay(3) == 4.0


def test_a_thousand_failures_do_not_overflow() -> None:
    assert Backoff(base_s=1.0, factor=10.0, max_s=60.0).delay(100_000) == 60.0
    assert Backoff(base_s=1.0, factor=10.0, max_s=60.0, jitter=0.5).delay(100_000, chance=0.5) == 45.0


def test_jitter_takes_off_at_most_its_share() -> None:
    backoff = Backoff(base_s=8.0, max_s=60.0, jitter=0.25)
    assert backoff.delay(1) == 8.0
    assert backoff.delay(1, chance=0.5) == 7.0
    assert backoff.delay(2, chance=1.0) == 12.0
    assert Backoff(base_s=8.0, max_s=60.0).delay(1, chance=0.5) == 8.0, "none unless asked for"


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_s": -1.0, "max_s": 1.0},
        {"base_s": 2.0, "max_s": 1.0},
        {"base_s": 1.0, "max_s": 2.0, "factor": 0.99},
        {"base_s": 1.0, "max_s": 2.0, "jitter": 1.01},
        {"base_s": 1.0, "max_s": 2.0, "jitter": -0.01},
        {"base_s": math.nan, "max_s": 2.0},
    ],
)
def test_a_backoff_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=r"^a back-off needs .*, got Backoff"):
        Backoff(**wrong)


def test_the_edges_of_a_backoff_are_allowed() -> None:
    assert Backoff(base_s=0.0, max_s=0.0, factor=1.0, jitter=0.0).delay(5) == 0.0
    assert Backoff(base_s=1.0, max_s=1.0, factor=1.0, jitter=1.0).delay(5, chance=1.0) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"failures": 0, "window_s": 1.0, "quarantines": 0},
        {"failures": 1, "window_s": 0.0, "quarantines": 0},
        {"failures": 1, "window_s": 1.0, "quarantines": -1},
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=r"^health limits need .*, got Limits"):
        Limits(backoff=Backoff(base_s=1.0, max_s=1.0), **wrong)  # type: ignore[arg-type]


def test_the_edges_of_limits_are_allowed() -> None:
    book = book_of(Limits(backoff=Backoff(base_s=1.0, max_s=1.0), failures=1, window_s=0.1, quarantines=0))
    assert book.failed(SLOT, 0.0, "no second chance") == GiveUp("no second chance")


@pytest.mark.parametrize(
    "value", [SMALL, SMALL.backoff, Retry(1.0, 1), Quarantine(1.0, 1), GiveUp("")], ids=lambda v: type(v).__name__
)
def test_limits_and_verdicts_are_values(value: object) -> None:
    hash(value)
    with pytest.raises(AttributeError):
        setattr(value, type(value).__struct_fields__[0], 2.0)  # type: ignore[attr-defined]


@given(
    base=st.floats(0.0, 10.0),
    factor=st.floats(1.0, 5.0),
    more=st.floats(0.0, 100.0),
    jitter=st.floats(0.0, 1.0),
    attempt=st.integers(1, 2000),
    chance=st.floats(0.0, 1.0, exclude_max=True),
)
def test_delays_never_shrink_and_never_pass_the_maximum(
    base: float, factor: float, more: float, jitter: float, attempt: int, chance: float
) -> None:
    backoff = Backoff(base_s=base, factor=factor, max_s=base + more, jitter=jitter)
    assert backoff.delay(attempt) <= backoff.delay(attempt + 1) <= backoff.max_s
    assert (1.0 - jitter) * backoff.delay(attempt) <= backoff.delay(attempt, chance) <= backoff.delay(attempt)


# --- retry ----------------------------------------------------------------------------------------------------------


def test_news_of_a_part_without_failures_leaves_nothing() -> None:
    book = book_of(SMALL)
    book.succeeded(SLOT, 0.0)
    book.forget(SLOT)
    assert len(book._parts) == 0


def test_failures_in_a_row_wait_longer_each_time() -> None:
    book = book_of(SMALL)
    assert book.failed(SLOT, 10.0, "no image") == Retry(at=11.0, attempt=1)
    assert book.failed(SLOT, 11.0, "no image") == Retry(at=13.0, attempt=2)


def test_a_success_starts_the_back_off_over() -> None:
    book = book_of(SMALL)
    book.failed(SLOT, 10.0, "no image")
    book.succeeded(SLOT, 11.0)
    assert book.failed(SLOT, 12.0, "no image") == Retry(at=13.0, attempt=1)


def test_jitter_reaches_the_verdict() -> None:
    half = Backoff(base_s=8.0, max_s=8.0, jitter=0.5)
    book = book_of(Limits(backoff=half, failures=2, window_s=9.0, quarantine=half, quarantines=1), seed=3)
    retry = book.failed(SLOT, 0.0, "")
    assert retry == Retry(at=8.0 - 4.0 * uniform(3, SLOT, 1), attempt=1)
    assert book.failed(SLOT, 6.0, "") == Quarantine(until=14.0 - 4.0 * uniform(3, SLOT, 2), failures=2)


def test_parts_attempts_and_runs_have_jitter_of_their_own() -> None:
    """The same for the same run, in any process: the first value is pinned."""

    def delays(seed: int) -> list[float]:
        book = book_of(ENVIRONMENT, seed)
        first = [book.failed(f"slot {index}", 0.0, "") for index in range(20)]
        second = [book.failed(f"slot {index}", 10.0, "") for index in range(20)]
        return [verdict.at for verdict in (*first, *second) if isinstance(verdict, Retry)]

    here = delays(0)
    assert here == delays(0)
    assert here[0] == pytest.approx(0.69629, abs=1e-5)
    assert len({*here, *delays(1)}) == 80
    assert all(0.5 < at <= 1.0 for at in here[:20])
    assert all(11.0 < at <= 12.0 for at in here[20:])


# --- quarantine -----------------------------------------------------------------------------------------------------


def quarantined(book: HealthBook, start: float = 0.0) -> Quarantine:
    """Three quick failures from `start` on; the third is at start + 2."""
    book.failed(SLOT, start, "no image")
    book.failed(SLOT, start + 1.0, "no image")
    verdict = book.failed(SLOT, start + 2.0, "no image")
    assert isinstance(verdict, Quarantine)
    return verdict


def test_enough_failures_within_the_window_quarantine_a_part() -> None:
    book = book_of(SMALL)
    assert quarantined(book) == Quarantine(until=52.0, failures=3)


def test_successes_in_between_do_not_hide_a_flaky_part() -> None:
    book = book_of(SMALL)
    for now in (0.0, 30.0):
        assert book.failed(SLOT, now, "no image") == Retry(at=now + 1.0, attempt=1)
        book.succeeded(SLOT, now + 5.0)
    assert book.failed(SLOT, 60.0, "no image") == Quarantine(until=110.0, failures=3)


def test_failures_at_the_edge_of_the_window() -> None:
    book = book_of(SMALL)
    book.failed(SLOT, 0.0, "")
    book.failed(SLOT, 50.0, "")
    assert isinstance(book.failed(SLOT, 99.9, ""), Quarantine)
    book = book_of(SMALL)
    book.failed(SLOT, 0.0, "")
    book.failed(SLOT, 50.0, "")
    assert book.failed(SLOT, 100.0, "") == Retry(at=104.0, attempt=3), "the first is no longer within the window"
    assert isinstance(book.failed(SLOT, 149.9, ""), Quarantine)


def test_late_failures_belong_to_the_quarantine_that_they_arrive_in() -> None:
    book = book_of(SMALL)
    first = quarantined(book)
    for now in (2.0, 30.0, 51.9):
        assert book.failed(SLOT, now, "no image") == first
    assert book.failed(SLOT, 52.0, "no image") == Quarantine(until=127.0, failures=1), "a probe that failed"


def test_late_successes_do_not_end_a_quarantine() -> None:
    book = book_of(SMALL)
    quarantined(book)
    book.succeeded(SLOT, 51.9)
    assert isinstance(book.failed(SLOT, 52.0, "no image"), Quarantine), "still on probation"


def test_on_probation_one_failure_brings_the_next_and_longer_quarantine() -> None:
    book = book_of(SMALL)
    quarantined(book)
    assert book.failed(SLOT, 60.0, "no image") == Quarantine(until=135.0, failures=1)


def test_a_probe_that_succeeds_ends_the_probation() -> None:
    book = book_of(SMALL)
    quarantined(book)
    book.succeeded(SLOT, 52.0)
    assert book.failed(SLOT, 60.0, "no image") == Retry(at=61.0, attempt=1)
    assert book.failed(SLOT, 61.0, "no image") == Retry(at=63.0, attempt=2)
    assert book.failed(SLOT, 63.0, "no image") == Quarantine(until=138.0, failures=3), "the second is still longer"


# --- giving up ------------------------------------------------------------------------------------------------------


def test_after_its_last_quarantine_a_part_is_given_up_for_good() -> None:
    book = book_of(SMALL)
    quarantined(book)
    book.failed(SLOT, 60.0, "no image")
    assert book.failed(SLOT, 140.0, "image gone") == GiveUp("image gone")
    book.succeeded(SLOT, 10_000.0)
    assert book.failed(SLOT, 10_001.0, "something else") == GiveUp("image gone")
    book.forget(SLOT)
    assert book.failed(SLOT, 10_002.0, "") == Retry(at=10_003.0, attempt=1)


def test_a_success_after_a_whole_window_without_failure_wipes_the_slate() -> None:
    book = book_of(SMALL)
    quarantined(book)
    book.succeeded(SLOT, 102.0)  # the last failure was at 2.0
    assert quarantined(book, 200.0) == Quarantine(until=252.0, failures=3), "as long as the first one"


def test_a_success_before_that_leaves_the_past_standing() -> None:
    book = book_of(SMALL)
    quarantined(book)
    book.succeeded(SLOT, 101.9)
    assert quarantined(book, 200.0) == Quarantine(until=277.0, failures=3)


def test_the_window_counts_from_the_last_failure() -> None:
    book = book_of(SMALL)
    book.failed(SLOT, 0.0, "")
    book.failed(SLOT, 90.0, "")
    book.succeeded(SLOT, 100.0)
    assert book.failed(SLOT, 189.0, "") == Retry(at=190.0, attempt=1)
    assert isinstance(book.failed(SLOT, 189.5, ""), Quarantine), "with that of 90.0 it is the third"


def test_so_many_failures_in_a_row_are_enough_however_long_they_take() -> None:
    limits = Limits(backoff=Backoff(base_s=1.0, max_s=1.0), failures=3, window_s=10.0, in_a_row=3)
    book = book_of(limits)
    assert book.failed(SLOT, 0.0, "x") == Retry(1.0, 1)
    assert book.failed(SLOT, 1000.0, "x") == Retry(1001.0, 2)
    assert book.failed(SLOT, 2000.0, "the last one") == GiveUp("the last one")


def test_a_success_between_them_ends_the_row() -> None:
    limits = Limits(backoff=Backoff(base_s=1.0, max_s=1.0), failures=3, window_s=10.0, in_a_row=3)
    book = book_of(limits)
    for start in (0.0, 10_000.0, 20_000.0):
        assert isinstance(book.failed(SLOT, start, "x"), Retry)
        assert isinstance(book.failed(SLOT, start + 1000.0, "x"), Retry)
        book.succeeded(SLOT, start + 1001.0)


# --- ready-made limits ----------------------------------------------------------------------------------------------


def test_an_environment_is_quarantined_again_and_again_but_never_removed() -> None:
    book = without_jitter(ENVIRONMENT)
    assert book.failed(SLOT, 0.0, "") == Retry(at=1.0, attempt=1)
    assert book.failed(SLOT, 1.0, "") == Retry(at=3.0, attempt=2)
    assert book.failed(SLOT, 3.0, "") == Quarantine(until=63.0, failures=3)
    assert book.failed(SLOT, 63.0, "") == Quarantine(until=183.0, failures=1)
    assert book.failed(SLOT, 183.0, "") == Quarantine(until=423.0, failures=1)
    assert book.failed(SLOT, 423.0, "no image") == Quarantine(until=723.0, failures=1), "five minutes at the most"
    assert book.failed(SLOT, 723.0, "no image") == Quarantine(until=1023.0, failures=1)


def test_an_engine_is_restarted_in_place_and_removed_when_the_failure_repeats() -> None:
    book = book_of(ENGINE)
    assert book.failed("engine/H20/0", 0.0, "killed") == Retry(at=1.0, attempt=1)
    book.succeeded("engine/H20/0", 5.0)
    assert book.failed("engine/H20/0", 599.9, "killed again") == GiveUp("killed again")


def test_an_engine_that_fails_once_in_a_while_is_restarted_each_time() -> None:
    book = book_of(ENGINE)
    for hour in range(5):
        assert book.failed("engine/H20/0", hour * 3600.0, "killed") == Retry(at=hour * 3600.0 + 1.0, attempt=1)
        book.succeeded("engine/H20/0", hour * 3600.0 + 5.0)


def test_a_worker_is_given_up_at_six_deaths_in_ten_minutes() -> None:
    flaky = book_of(WORKER)
    for now in (0.0, 100.0, 200.0, 300.0, 400.0):
        assert flaky.failed("worker", now, "x") == Retry(now + 1.0, 1)
        flaky.succeeded("worker", now + 50.0)
    assert flaky.failed("worker", 599.9, "x") == GiveUp("x")


def test_a_worker_that_dies_less_often_is_restarted_each_time() -> None:
    book = book_of(WORKER)
    for number in range(50):
        assert isinstance(book.failed("worker", 120.0 * number, "x"), Retry), "the sixth comes after ten minutes"
        book.succeeded("worker", 120.0 * number + 50.0)


def test_a_worker_that_gets_nothing_done_is_given_up_at_its_sixth_death() -> None:
    book = book_of(WORKER)
    verdicts = [book.failed("worker", 1000.0 * number, "x") for number in range(6)]
    assert [verdict.at - 1000.0 * n for n, verdict in enumerate(verdicts) if isinstance(verdict, Retry)] == [
        1.0,
        2.0,
        4.0,
        8.0,
        16.0,
    ]
    assert verdicts[-1] == GiveUp("x")


def test_a_reward_is_asked_five_times_however_long_that_takes() -> None:
    book = without_jitter(REWARD)
    at = [book.failed("traj-7/reward", now, "503") for now in (0.0, 1e3, 2e3, 3e3)]
    assert at == [Retry(0.5, 1), Retry(1001.0, 2), Retry(2002.0, 3), Retry(3004.0, 4)]
    assert book.failed("traj-7/reward", 1e9, "503") == GiveUp("503")


def test_no_back_off_grows_beyond_what_a_run_can_wait_for() -> None:
    assert [limits.backoff.delay(99) for limits in (ENVIRONMENT, ENGINE, REWARD)] == [60.0, 30.0, 30.0]
    assert ENVIRONMENT.quarantine.delay(99) == 300.0


def test_the_windows_of_environments_and_engines_end_on_time() -> None:
    book = without_jitter(ENVIRONMENT)
    for now in (0.0, 150.0, 300.0):
        assert isinstance(book.failed(SLOT, now, ""), Retry)
    book = book_of(ENGINE)
    for now in (0.0, 600.0, 1200.0):
        assert isinstance(book.failed("engine/H20/0", now, ""), Retry)
        book.succeeded("engine/H20/0", now + 1.0)


def test_an_engine_that_fails_before_it_served_again_is_given_up_however_late() -> None:
    book = HealthBook(ENGINE, seed=0)
    assert isinstance(book.failed("engine/H20/0", 0.0, "it did not come up"), Retry)
    assert book.failed("engine/H20/0", 1801.0, "it did not come up") == GiveUp("it did not come up")


# --- any history ------------------------------------------------------------------------------------------------------


def test_a_million_reward_keys_leave_nothing_behind() -> None:
    book = without_jitter(REWARD)
    for index in range(5_000):
        book.failed(f"key {index}", float(index), "503")
        book.succeeded(f"key {index}", index + 1.0)
        book.forget(f"key {index}")
    assert len(book._parts) == 0


news = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from(["failed", "failed", "succeeded"]),
        st.sampled_from([0.0, 0.5, 1.0, 7.0, 50.0, 100.0]),
    ),
    min_size=20,
    max_size=60,
)


@given(news)
def test_verdicts_are_kept_in_any_history(history: list[tuple[str, str, float]]) -> None:
    book, now = book_of(SMALL), 0.0
    until: dict[str, float] = {}
    quarantines = {"a": 0, "b": 0}
    gone: set[str] = set()
    for part, what, later in history:
        now += later
        if what == "succeeded":
            book.succeeded(part, now)
        else:
            verdict = book.failed(part, now, "why")
            assert part not in gone or isinstance(verdict, GiveUp)
            if isinstance(verdict, GiveUp):
                gone.add(part)
            elif isinstance(verdict, Retry):
                assert now + 1.0 <= verdict.at <= now + 8.0
                until[part] = verdict.at
            else:
                assert now < verdict.until <= now + 75.0
                quarantines[part] += verdict.until != until.get(part)
                until[part] = verdict.until
    # Twice in quarantine, then out, unless a whole quiet window lay between.
    for part in gone:
        assert quarantines[part] >= 2
