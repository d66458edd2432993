"""Shares as a specification: first by example, then as properties of arbitrary histories."""

from collections.abc import Mapping

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rollart.policy.shares import Redistributed, ShareBook, ShareRule, Unfillable


def share(groups: int, deadline_s: float = 60.0) -> ShareRule:
    return ShareRule(groups, deadline_s, "redistribute")


def waiting(now: float = 100.0, **rules: ShareRule) -> ShareBook:
    """Shares of a batch that the trainer waits for since `now`."""
    book = ShareBook(rules)
    book.wait_started(now)
    return book


# --- the usual batch ------------------------------------------------------------------------------------------------


def test_a_batch_holds_the_share_of_every_task() -> None:
    book = ShareBook({"maze": share(3), "math": share(1)})
    assert book.need == book.usual() == {"maze": 3, "math": 1}


@pytest.mark.parametrize(
    ("ready", "missing"),
    [
        ({}, {"maze": 3, "math": 1}),
        ({"maze": 2, "math": 1}, {"maze": 1}),
        ({"maze": 3, "math": 1}, {}),
        ({"maze": 9, "math": 0}, {"math": 1}),
    ],
)
def test_missing_is_what_the_batch_still_waits_for(ready: dict[str, int], missing: dict[str, int]) -> None:
    assert ShareBook({"maze": share(3), "math": share(1)}).missing(ready) == missing


# --- groups without signal ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "refused"), [(0.0, 0), (0.5, 2), (1.0, 3), (2.0, 6)])
def test_so_many_are_refused_for_a_batch_and_no_more(limit: float, refused: int) -> None:
    book = ShareBook({"maze": share(3), "math": share(1)}, limit)
    for _ in range(2):
        assert [book.refuse("maze") for _ in range(10)] == [True] * refused + [False] * (10 - refused)
        assert book.refuse("math") is (limit > 0)
        book.claimed()


def test_without_a_limit_the_deadline_of_the_share_is_the_limit() -> None:
    assert all(ShareBook({"maze": share(1)}).refuse("maze") for _ in range(1000))


# --- deadlines ------------------------------------------------------------------------------------------------------


def test_nothing_is_late_while_nobody_waits() -> None:
    book = ShareBook({"maze": share(1, 5.0)})
    assert book.next_wake() is None
    assert book.check({}, now=1e9) is None


def test_the_wait_starts_when_the_trainer_is_free_and_is_over_at_the_claim() -> None:
    book = waiting(maze=share(1, 5.0))
    assert book.next_wake() == 105.0
    book.claimed()
    assert book.next_wake() is None
    assert book.check({}, now=1e9) is None
    book.wait_started(300.0)
    assert book.next_wake() == 305.0


def test_a_deadline_is_acted_on_when_it_is_reached_and_not_before() -> None:
    book = waiting(maze=share(2, 60.0), math=share(2, 90.0))
    ready = {"math": 2}
    assert book.next_wake() == 160.0
    assert book.check(ready, now=159.99) is None
    assert isinstance(book.check(ready, now=160.0), Redistributed)


def test_every_deadline_is_asked_for_in_turn_and_once() -> None:
    book = waiting(maze=share(2, 60.0), math=share(2, 90.0))
    assert book.next_wake() == 160.0
    assert book.check({"maze": 2, "math": 1}, now=160.0) is None, "the late one has filled its share"
    assert book.next_wake() == 190.0
    verdict = book.check({"maze": 2, "math": 1}, now=190.0)
    assert isinstance(verdict, Redistributed)
    assert book.next_wake() == 250.0, "a task that fills in gets its time again"
    assert book.check({"maze": 2, "math": 1}, now=249.0) is None
    assert isinstance(book.check({"maze": 2, "math": 1}, now=250.0), Unfillable)


def test_nobody_stops_the_run_while_somebody_short_still_has_time() -> None:
    book = waiting(maze=share(2, 60.0), math=share(2, 90.0))
    assert book.check({"maze": 1, "math": 1}, now=160.0) is None, "math may still fill its share, and then fill in"
    assert isinstance(book.check({"maze": 1, "math": 2}, now=170.0), Redistributed)
    assert book.need == {"maze": 1, "math": 3}


def test_who_gave_up_is_not_asked_to_fill_in() -> None:
    book = waiting(maze=share(2, 60.0), math=share(2, 90.0))
    assert isinstance(book.check({"maze": 1, "math": 2}, now=160.0), Redistributed)
    assert book.check({"maze": 1, "math": 2}, now=249.0) is None
    assert isinstance(book.check({"maze": 1, "math": 2}, now=250.0), Unfillable)


def test_a_task_that_fills_its_share_in_time_changes_nothing() -> None:
    book = waiting(maze=share(1), math=share(1))
    assert book.check({"maze": 1, "math": 1}, now=160.0) is None
    assert book.need == {"maze": 1, "math": 1}


# --- redistribution -------------------------------------------------------------------------------------------------


def test_others_fill_in_for_what_is_missing_in_turn() -> None:
    book = waiting(maze=share(4), math=share(2), code=share(2))
    verdict = book.check({"maze": 1, "math": 2, "code": 5}, now=160.0)
    assert verdict == Redistributed({"maze": 3}, {"math": 2, "code": 1}, "share not filled after 60 s")
    assert book.need == {"maze": 1, "math": 4, "code": 3}
    assert book.missing({"maze": 1, "math": 2, "code": 5}) == {"math": 2}


def test_who_does_not_have_to_fill_in_is_not_named() -> None:
    book = waiting(maze=share(1), math=share(2), code=share(2))
    verdict = book.check({"math": 2, "code": 2}, now=160.0)
    assert isinstance(verdict, Redistributed)
    assert verdict.filled_by == {"math": 1}
    assert book.need == {"maze": 0, "math": 3, "code": 2}


def test_several_late_tasks_give_up_together() -> None:
    book = waiting(maze=share(2), math=share(2), code=share(1))
    verdict = book.check({"maze": 1, "code": 1}, now=160.0)
    assert isinstance(verdict, Redistributed)
    assert verdict.missing == {"maze": 1, "math": 2}
    assert verdict.filled_by == {"code": 3}
    assert book.need == {"maze": 1, "math": 0, "code": 4}


def test_one_that_is_short_but_not_late_keeps_its_share_and_does_not_fill_in() -> None:
    book = waiting(maze=share(2, 60.0), math=share(2, 90.0), code=share(2, 90.0))
    verdict = book.check({"math": 1, "code": 2}, now=160.0)
    assert isinstance(verdict, Redistributed)
    assert verdict.missing == {"maze": 2}
    assert verdict.filled_by == {"code": 2}
    assert book.need == {"maze": 0, "math": 2, "code": 4}


def test_the_next_batch_has_the_usual_shares_again_and_deadlines_too() -> None:
    book = waiting(maze=share(2), math=share(2))
    book.check({"math": 2}, now=160.0)
    assert book.need == {"maze": 0, "math": 4}
    book.claimed()
    assert book.need == {"maze": 2, "math": 2}
    book.wait_started(200.0)
    assert book.next_wake() == 260.0
    assert isinstance(book.check({"math": 2}, now=260.0), Redistributed)


def test_what_was_handed_out_does_not_change_the_usual_shares() -> None:
    book = ShareBook({"maze": share(1)})
    book.usual()["maze"] = 99
    assert book.need == book.usual() == {"maze": 1}


def test_who_gave_up_may_fill_in_for_the_next_batch() -> None:
    book = waiting(maze=share(2), math=share(2))
    assert isinstance(book.check({"math": 2}, now=160.0), Redistributed)
    book.claimed()
    book.wait_started(200.0)
    verdict = book.check({"maze": 2}, now=260.0)
    assert isinstance(verdict, Redistributed)
    assert verdict.filled_by == {"maze": 2}


# --- no task can fill in --------------------------------------------------------------------------------------------


def test_a_task_may_stop_the_run_instead() -> None:
    book = waiting(maze=ShareRule(2, 60.0, "stop"), math=share(2))
    verdict = book.check({"maze": 1, "math": 2}, now=162.5)
    assert verdict == Unfillable("task maze is 1 groups short of its share after 62.5 s")
    assert book.need == {"maze": 2, "math": 2}


def test_a_task_that_stops_the_run_does_so_only_when_it_is_late_itself() -> None:
    book = waiting(maze=ShareRule(2, 90.0, "stop"), math=share(2, 60.0), code=share(2, 60.0))
    assert isinstance(book.check({"maze": 1, "code": 2}, now=160.0), Redistributed)
    verdict = book.check({"maze": 1, "code": 4}, now=190.0)
    assert verdict == Unfillable("task maze is 1 groups short of its share after 90 s")


def test_when_no_task_fills_its_share_the_run_stops_and_says_who() -> None:
    book = waiting(maze=share(2), math=share(3))
    verdict = book.check({"maze": 1}, now=160.0)
    assert verdict == Unfillable("no task fills its share after 60 s: maze (1 short), math (3 short)")


def test_a_task_alone_has_nobody_to_fill_in() -> None:
    assert isinstance(waiting(maze=share(1)).check({}, now=160.0), Unfillable)


# --- any history ----------------------------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """Groups come and go, time passes, deadlines are checked late or not at all."""

    @initialize(
        shares=st.dictionaries(
            st.sampled_from(["maze", "math", "code"]),
            st.builds(
                ShareRule,
                st.integers(1, 4),
                st.sampled_from([10.0, 20.0, 30.0]),
                st.sampled_from(["redistribute", "redistribute", "stop"]),
            ),
            min_size=1,
        )
    )
    def begin(self, shares: dict[str, ShareRule]) -> None:
        self.shares = shares
        self.book = ShareBook(shares)
        self.now = 0.0
        self.since: float | None = None
        self.ready: dict[str, int] = {}

    @rule(task=st.sampled_from(["maze", "math", "code"]), count=st.integers(0, 6))
    def groups_are_ready(self, task: str, count: int) -> None:
        if task in self.shares:
            self.ready[task] = count

    @rule(seconds=st.sampled_from([1.0, 5.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def trainer_is_free(self) -> None:
        if self.since is None:
            self.since = self.now
            self.book.wait_started(self.now)

    @rule()
    def claim(self) -> None:
        if not self.book.missing(self.ready):
            self.book.claimed()
            self.since = None
            assert self.book.need == self.book.usual()

    @rule()
    def check(self) -> None:
        before: Mapping[str, int] = dict(self.book.need)
        short = self.book.missing(self.ready)
        verdict = self.book.check(self.ready, self.now)
        if verdict is not None:
            assert self.since is not None
            assert self.now >= self.since + min(rule.deadline_s for rule in self.shares.values())
        later = self.book.next_wake()
        assert later is None or later > self.now
        if isinstance(verdict, Redistributed):
            assert sum(verdict.missing.values()) == sum(verdict.filled_by.values()) > 0
            assert not set(verdict.missing) & set(verdict.filled_by)
            assert verdict.missing.items() <= short.items()
            assert not set(verdict.filled_by) & set(short)
            assert all(count > 0 for count in verdict.filled_by.values())
            assert max(verdict.filled_by.values()) - min(verdict.filled_by.values()) <= 1
            for task in self.shares:
                change = verdict.filled_by.get(task, 0) - verdict.missing.get(task, 0)
                assert self.book.need[task] == before[task] + change
        else:
            assert self.book.need == before

    @invariant()
    def the_batch_is_whole(self) -> None:
        assert sum(self.book.need.values()) == sum(rule.groups for rule in self.shares.values())
        assert set(self.book.need) == set(self.shares)
        assert min(self.book.need.values()) >= 0

    @invariant()
    def missing_is_exact(self) -> None:
        missing = self.book.missing(self.ready)
        for task, need in self.book.need.items():
            assert missing.get(task, 0) == max(0, need - self.ready.get(task, 0))
        assert 0 not in missing.values()

    @invariant()
    def somebody_is_woken_while_the_trainer_waits(self) -> None:
        wake = self.book.next_wake()
        if self.since is None:
            assert wake is None
        elif wake is not None:
            assert wake >= self.since + min(rule.deadline_s for rule in self.shares.values())


def test_the_rules_hold_in_any_history() -> None:
    run_state_machine_as_test(
        Histories, settings=settings(max_examples=80, stateful_step_count=40, deadline=None, print_blob=False)
    )
