"""The turn barrier as a specification: all or none, and it never waits for members that left."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.policy.barrier import TurnBarrier


def barrier(*members: str) -> TurnBarrier[str]:
    made: TurnBarrier[str] = TurnBarrier()
    for member in members:
        made.join(member)
    return made


def test_the_last_to_arrive_releases_everybody_in_the_order_of_arrival() -> None:
    turn = barrier("a", "b", "c")
    assert turn.arrive("b") == []
    assert turn.arrive("a") == []
    assert turn.waiting == 2
    assert turn.arrive("c") == ["b", "a", "c"]
    assert turn.waiting == 0


def test_after_a_release_everybody_is_away_again() -> None:
    turn = barrier("a", "b")
    turn.arrive("a")
    turn.arrive("b")
    assert turn.arrive("b") == []
    assert turn.arrive("a") == ["b", "a"]


def test_one_alone_does_not_wait() -> None:
    turn = barrier("a")
    assert turn.arrive("a") == ["a"]
    assert turn.arrive("a") == ["a"]


def test_the_last_one_away_leaves_and_the_others_go_on() -> None:
    turn = barrier("a", "b", "c")
    turn.arrive("a")
    turn.arrive("b")
    assert turn.leave("c") == ["a", "b"]


def test_one_that_waits_may_leave_too_and_is_not_released() -> None:
    turn = barrier("a", "b", "c")
    turn.arrive("a")
    turn.arrive("b")
    assert turn.leave("a") == []
    assert turn.waiting == 1
    assert turn.arrive("c") == ["b", "c"]


def test_the_last_member_leaves_an_empty_barrier() -> None:
    turn = barrier("a")
    assert turn.leave("a") == []
    assert turn.leave("a") == [], "leaving twice is leaving once"
    assert turn.leave("never joined") == []


def test_a_newcomer_is_waited_for() -> None:
    turn = barrier("a", "b")
    turn.arrive("a")
    turn.join("c")
    assert turn.arrive("b") == []
    assert turn.arrive("c") == ["a", "b", "c"]


def test_only_members_that_are_away_arrive() -> None:
    turn = barrier("a", "b")
    turn.arrive("a")
    with pytest.raises(KeyError):
        turn.arrive("a")
    with pytest.raises(KeyError):
        turn.arrive("stranger")


moves = st.lists(st.tuples(st.sampled_from(["join", "arrive", "arrive", "leave"]), st.integers(0, 4)), max_size=60)


@settings(deadline=None, max_examples=200)
@given(moves)
def test_in_any_history_all_go_on_or_none(history: list[tuple[str, int]]) -> None:
    turn: TurnBarrier[int] = TurnBarrier()
    away: list[int] = []
    waiting: list[int] = []
    for move, member in history:
        if move == "join" and member not in away + waiting:
            turn.join(member)
            away.append(member)
            continue
        if move == "arrive" and member in away:
            away.remove(member)
            waiting.append(member)
            released = turn.arrive(member)
        elif move == "leave":
            away = [other for other in away if other != member]
            waiting = [other for other in waiting if other != member]
            released = turn.leave(member)
        else:
            continue
        expected = [] if away else waiting
        assert released == expected
        if expected:
            away, waiting = waiting, []
        assert turn.waiting == len(waiting)
        assert away or not waiting, "a member is still due, or none waits"
