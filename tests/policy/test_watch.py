"""The watchdog as a specification."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.policy.watch import Wait, Watch
from rollart.types.errors import InvariantBroken


def opened(watch: Watch, owner: str, seconds: float, now: float = 0.0) -> Wait:
    return watch.open(owner, "a turn", seconds, "retry", now)


def owners(waits: list[Wait]) -> list[str]:
    return [wait.owner for wait in waits]


def test_a_wait_says_who_waits_for_what_since_when_until_when_and_what_then() -> None:
    wait = Watch().open("trajectory 7", "its reward", 30.0, "ask again", now=100.0)
    assert (wait.owner, wait.what, wait.since, wait.deadline, wait.action) == (
        "trajectory 7",
        "its reward",
        100.0,
        130.0,
        "ask again",
    )


@pytest.mark.parametrize(
    ("owner", "what", "seconds", "action"),
    [
        ("", "x", 1.0, "x"),
        ("x", "", 1.0, "x"),
        ("x", "x", 1.0, ""),
        ("x", "x", math.inf, "x"),
        ("x", "x", math.nan, "x"),
        ("x", "x", -0.1, "x"),
    ],
)
def test_no_wait_without_an_owner_a_deadline_and_an_action(owner: str, what: str, seconds: float, action: str) -> None:
    watch = Watch()
    with pytest.raises(InvariantBroken, match="no wait without an owner, a deadline and an action"):
        watch.open(owner, what, seconds, action, 0.0)
    assert len(watch) == 0


def test_a_refused_wait_says_what_was_asked_for() -> None:
    with pytest.raises(InvariantBroken) as refused:
        Watch().open("trajectory 7", "its reward", math.inf, "ask again", 0.0)
    assert str(refused.value) == (
        "no wait without an owner, a deadline and an action: 'trajectory 7' waits inf s for 'its reward', "
        "then 'ask again'"
    )


def test_a_wait_of_no_time_expires_at_once() -> None:
    watch = Watch()
    opened(watch, "a", 0.0, now=5.0)
    assert owners(list(watch.expired(5.0))) == ["a"]


def test_a_wait_expires_at_its_deadline_and_not_before_and_once() -> None:
    watch = Watch()
    opened(watch, "a", 10.0)
    assert list(watch.expired(9.999)) == []
    assert owners(list(watch.expired(10.0))) == ["a"]
    assert list(watch.expired(10.0)) == []
    assert len(watch) == 0


def test_waits_expire_in_the_order_of_deadlines_then_of_opening() -> None:
    watch = Watch()
    for owner, seconds in (("late", 9.0), ("first of two", 5.0), ("second of two", 5.0), ("early", 1.0), ("no", 11.0)):
        opened(watch, owner, seconds)
    assert owners(list(watch.expired(10.0))) == ["early", "first of two", "second of two", "late"]
    assert len(watch) == 1


def test_a_closed_wait_never_expires() -> None:
    watch = Watch()
    wait, other = opened(watch, "a", 10.0), opened(watch, "b", 10.0)
    assert watch.close(wait) is True
    assert watch.close(wait) is False
    assert owners(list(watch.expired(10.0))) == ["b"]
    assert watch.close(other) is False, "it has expired"


def test_the_next_deadline_is_that_of_an_open_wait() -> None:
    watch = Watch()
    assert watch.next_deadline() is None
    waits = [opened(watch, "a", 20.0), opened(watch, "b", 10.0), opened(watch, "c", 15.0)]
    assert watch.next_deadline() == 10.0
    watch.close(waits[1])
    assert watch.next_deadline() == 15.0
    assert owners(list(watch.expired(15.0))) == ["c"]
    assert watch.next_deadline() == 20.0
    watch.close(waits[0])
    assert watch.next_deadline() is None


def test_the_report_names_what_is_waited_for_the_next_deadline_first() -> None:
    watch = Watch()
    watch.open("trajectory 7", "a turn of engine/H20/0", 120.0, "move to another engine", now=0.0)
    watch.open("trajectory 9", "its reward", 30.0, "ask again", now=10.0)
    closed = watch.open("trajectory 8", "its reset", 5.0, "take a fresh environment", now=10.0)
    watch.close(closed)
    assert watch.report(now=22.25, limit=5) == [
        "trajectory 9: its reward, waiting for 12.2 s; in 17.8 s: ask again",
        "trajectory 7: a turn of engine/H20/0, waiting for 22.2 s; in 97.8 s: move to another engine",
    ]


def test_the_report_counts_what_it_leaves_out() -> None:
    watch = Watch()
    for index in range(5):
        opened(watch, f"t{index}", 10.0)
    assert len(watch.report(0.0, limit=5)) == 5
    lines = watch.report(0.0, limit=2)
    assert [line.split(":")[0] for line in lines[:2]] == ["t0", "t1"]
    assert lines[2:] == ["… and 3 more waits with later deadlines"]


def test_the_report_shows_what_nobody_acted_on() -> None:
    watch = Watch()
    opened(watch, "a", 10.0)
    assert watch.report(10.0, 1) == ["a: a turn, waiting for 10.0 s; overdue by 0.0 s: retry"]
    assert watch.report(12.5, 1) == ["a: a turn, waiting for 12.5 s; overdue by 2.5 s: retry"]
    assert len(watch) == 1, "reporting takes nothing out"


def test_memory_stays_flat_over_many_waits() -> None:
    watch = Watch()
    kept = [opened(watch, f"kept {index}", 1e9 + index) for index in range(100)]
    for index in range(20_000):
        watch.close(opened(watch, "short", 60.0, now=float(index)))
        assert len(watch._heap) <= 2 * len(watch) + 66
    assert len(watch) == 100
    assert owners(list(watch.expired(2e9))) == owners(kept)


def test_a_clean_up_happens_only_when_it_pays() -> None:
    watch = Watch()
    waits = [opened(watch, "a", 60.0) for _ in range(66)]
    for wait in waits[:65]:
        watch.close(wait)
    assert len(watch._heap) == 66, "65 closed ones are not worth it while one is open"
    watch.close(waits[65])
    assert len(watch._heap) == 0


def test_a_clean_up_keeps_the_order_of_deadlines() -> None:
    watch = Watch()
    for seconds in (30.0, 10.0, 20.0):
        opened(watch, f"{seconds:g}", seconds)
    for _ in range(68):
        watch.close(opened(watch, "short", 5.0))
    assert len(watch._heap) == 3, "just cleaned up"
    assert watch.next_deadline() == 10.0
    assert owners(list(watch.expired(30.0))) == ["10", "20", "30"]


def test_a_wait_can_be_used_again_and_has_its_new_deadline_only() -> None:
    watch = Watch()
    wait = opened(watch, "a", 10.0)
    with pytest.raises(InvariantBroken, match="still open for a turn"):
        watch.open("a", "a reset", 5.0, "retry", 0.0, wait)
    watch.close(wait)
    watch.open("a", "a step", 30.0, "retry", 5.0, wait)
    assert list(watch.expired(10.0)) == [], "the first deadline is void"
    assert watch.report(10.0, 5) == ["a: a step, waiting for 5.0 s; in 25.0 s: retry"]
    watch.close(wait)
    watch.open("a", "a turn", 2.0, "retry", 10.0, wait)
    assert watch.next_deadline() == 12.0, "shorter than the one before"
    assert owners(list(watch.expired(12.0))) == ["a"]
    watch.open("a", "a turn", 2.0, "retry", 12.0, wait)
    assert owners(list(watch.expired(100.0))) == ["a"], "an expired one can be opened again"
    assert len(watch) == 0
    assert watch._heap == []


def test_a_wait_used_again_keeps_its_place_in_the_queue() -> None:
    watch = Watch()
    waits = [opened(watch, str(index), 60.0) for index in range(100)]
    for now in range(1, 50):
        for wait in waits:
            watch.close(wait)
            watch.open(wait.owner, "a turn", 60.0, "retry", float(now), wait)
    assert len(watch._heap) == 100, "nothing was queued again"
    assert owners(list(watch.expired(109.0))) == [str(index) for index in range(100)]


def test_the_report_names_a_wait_once_that_was_used_again_with_less_time() -> None:
    watch = Watch()
    wait = opened(watch, "a", 100.0)
    watch.close(wait)
    watch.open("a", "a turn", 10.0, "retry", 0.0, wait)
    assert watch.report(0.0, limit=5) == ["a: a turn, waiting for 0.0 s; in 10.0 s: retry"]


def clean_up(watch: Watch) -> None:
    """Open and close enough waits for the queue to be cleaned."""
    for wait in [opened(watch, "other", 1.0) for _ in range(200)]:
        watch.close(wait)


@pytest.mark.parametrize("open_at_the_clean_up", [False, True])
def test_a_wait_used_again_expires_at_its_new_deadline_after_a_clean_up(open_at_the_clean_up: bool) -> None:
    watch = Watch()
    wait = opened(watch, "a", 10.0)
    watch.close(wait)
    if not open_at_the_clean_up:
        clean_up(watch)
    watch.open("a", "a turn", 20.0, "retry", 0.0, wait)
    if open_at_the_clean_up:
        clean_up(watch)
    assert watch.next_deadline() == 20.0
    assert owners(list(watch.expired(20.0))) == ["a"]


def test_what_an_action_closes_does_not_expire_with_it() -> None:
    watch = Watch()
    first, second = opened(watch, "a", 1.0), opened(watch, "b", 1.0)
    for late in watch.expired(1.0):
        assert late is first
        watch.close(second)
    assert len(watch) == 0


steps = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 8)),
        st.tuples(st.just("open"), st.integers(0, 8)),
        st.tuples(st.just("close"), st.integers(0, 200)),
        st.tuples(st.just("again"), st.integers(0, 200)),
        st.tuples(st.just("expire"), st.integers(0, 4)),
    ),
    min_size=20,
    max_size=300,
)


@given(steps)
def test_every_wait_leaves_by_exactly_one_door(history: list[tuple[str, int]]) -> None:
    watch, now = Watch(), 0.0
    waits: list[Wait] = []
    inside: dict[int, Wait] = {}
    for what, number in history:
        if what == "open":
            wait = opened(watch, f"w{len(waits)}", float(number), now)
            waits.append(wait)
            inside[wait.id] = wait
        elif what == "close" and waits:
            wait = waits[number % len(waits)]
            assert watch.close(wait) == (inside.pop(wait.id, None) is not None)
        elif what == "again" and waits:
            wait = waits[number % len(waits)]
            inside.pop(wait.id, None)
            watch.close(wait)
            watch.open(wait.owner, "a turn", float(number % 9), "retry", now, wait)
            inside[wait.id] = wait
        elif what == "expire":
            now += number
            due = sorted((w.deadline, w.id) for w in inside.values() if w.deadline <= now)
            assert [(w.deadline, w.id) for w in watch.expired(now)] == due
            for _, id in due:
                del inside[id]
        assert len(watch) == len(inside)
        assert watch.next_deadline() == min((w.deadline for w in inside.values()), default=None)
