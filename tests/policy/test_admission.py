"""Admission as a specification: what may be in the making, and that it never outgrows the staleness bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.config.modes import MODES, Mode
from rollart.policy.admission import batches_in_the_making, groups_to_start
from rollart.policy.staleness import timeline

DRAINED = (Mode.SYNC, Mode.SYNC_PLUS, Mode.ONE_OFF)
INTERRUPTED = (Mode.AREAL, Mode.ROLLART)


def batches(mode: Mode, alpha: int, served: int, claims: int) -> int:
    return batches_in_the_making(MODES[mode], alpha=alpha, served=served, claims=claims)


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", INTERRUPTED)
@pytest.mark.parametrize(("alpha", "at_start"), [(0, 2), (1, 3), (2, 4), (5, 7)])
def test_at_the_start_what_can_be_claimed_before_the_first_tokens_are_too_old(
    mode: Mode, alpha: int, at_start: int
) -> None:
    assert batches(mode, alpha, served=0, claims=0) == at_start


def test_every_claim_takes_one_away_and_every_update_gives_one_back() -> None:
    assert [batches(Mode.ROLLART, 1, served=0, claims=claims) for claims in range(5)] == [3, 2, 1, 0, 0]
    assert [batches(Mode.ROLLART, 1, served=served, claims=3) for served in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("alpha", [0, 1, 5])
@pytest.mark.parametrize("mode", DRAINED)
def test_where_rollout_is_drained_one_batch_is_in_the_making(mode: Mode, alpha: int) -> None:
    assert batches(mode, alpha, served=0, claims=0) == 1
    assert batches(mode, alpha, served=5, claims=5) == 1
    assert batches(mode, alpha, served=9, claims=0) == 1, "however far behind the claims are"


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.SYNC_PLUS])
def test_where_training_comes_first_nothing_starts_between_claim_and_update(mode: Mode) -> None:
    assert batches(mode, 1, served=0, claims=1) == 0
    assert batches(mode, 1, served=1, claims=1) == 1


def test_one_off_rolls_out_the_next_batch_beside_training() -> None:
    assert batches(Mode.ONE_OFF, 1, served=0, claims=1) == 1
    assert batches(Mode.ONE_OFF, 1, served=0, claims=2) == 0


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("alpha", range(6))
def test_what_starts_now_is_claimed_within_the_bound(mode: Mode, alpha: int) -> None:
    """The last batch that may be in the making at `served` is claimed while its first tokens are within alpha."""
    claims = timeline(MODES[mode], alpha, 30)
    for served in range(10):
        for claim in range(served, served + 3):
            ahead = batches(mode, alpha, served=served, claims=claim)
            if ahead:
                last = claims[claim + ahead - 1]
                assert served in last.first or last.served < served
                assert last.served - served <= (alpha if mode in INTERRUPTED else 0)


@pytest.mark.parametrize("mode", INTERRUPTED)
@pytest.mark.parametrize("alpha", range(6))
def test_no_less_is_started_than_the_bound_allows(mode: Mode, alpha: int) -> None:
    """One batch more than admission allows would be claimed one step too late."""
    ahead = batches(mode, alpha, served=3, claims=4)
    claims = timeline(MODES[mode], alpha, 30)
    assert claims[4 + ahead - 1].served - 3 == alpha
    assert claims[4 + ahead].served - 3 == alpha + 1


@given(st.sampled_from(Mode), st.integers(0, 5), st.integers(0, 100), st.integers(0, 100))
def test_the_buffer_holds_a_few_batches_whatever_the_trainer_does(
    mode: Mode, alpha: int, served: int, ahead: int
) -> None:
    assert 0 <= batches(mode, alpha, served=served, claims=served + ahead) <= alpha + 2


# --- groups ---------------------------------------------------------------------------------------------------------


def test_the_next_batch_has_its_own_needs_and_later_ones_the_usual() -> None:
    allowed = groups_to_start(
        batches={"maze": 3, "math": 2},
        current={"maze": 1, "math": 5},
        usual={"maze": 3, "math": 3},
        in_the_making={"maze": 2, "math": 4},
        extra=0,
    )
    assert allowed == {"maze": 1 + 2 * 3 - 2, "math": 5 + 1 * 3 - 4}


@pytest.mark.parametrize(("in_the_making", "allowed"), [(0, 4), (3, 1), (4, 0), (5, 0)])
def test_never_more_than_the_batches_hold(in_the_making: int, allowed: int) -> None:
    started = groups_to_start(
        batches={"maze": 1}, current={"maze": 4}, usual={"maze": 4}, in_the_making={"maze": in_the_making}, extra=0
    )
    assert started == {"maze": allowed}


def test_what_is_not_counted_yet_is_none() -> None:
    started = groups_to_start(batches={"maze": 1}, current={"maze": 4}, usual={"maze": 4}, in_the_making={}, extra=0)
    assert started == {"maze": 4}


def test_extra_groups_come_on_top_of_each_task_once() -> None:
    allowed = groups_to_start(
        batches={"maze": 2, "math": 2},
        current={"maze": 1, "math": 2},
        usual={"maze": 1, "math": 2},
        in_the_making={"math": 1},
        extra=3,
    )
    assert allowed == {"maze": 5, "math": 6}


@pytest.mark.parametrize("batches", [0, -1])
def test_without_a_batch_in_the_making_nothing_starts_not_even_extra(batches: int) -> None:
    allowed = groups_to_start(
        batches={"maze": batches, "math": 1},
        current={"maze": 4, "math": 4},
        usual={"maze": 4, "math": 4},
        in_the_making={},
        extra=2,
    )
    assert allowed == {"maze": 0, "math": 6}


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(0, 5), st.integers(1, 6), st.integers(0, 30), st.integers(0, 3))
def test_filling_up_leaves_nothing_to_start(
    batches: int, current: int, usual: int, in_the_making: int, extra: int
) -> None:
    def allowed(open_now: int) -> int:
        return groups_to_start(
            batches={"maze": batches},
            current={"maze": current},
            usual={"maze": usual},
            in_the_making={"maze": open_now},
            extra=extra,
        )["maze"]

    more = allowed(in_the_making)
    assert more >= 0
    assert allowed(in_the_making + more) == 0
    if more:
        assert allowed(in_the_making + more - 1) == 1
        assert in_the_making + more == current + (batches - 1) * usual + extra
