"""Staleness as a specification: the tables of its docstring, and what holds in every mode."""

import itertools
import re

import pytest

import rollart.policy.staleness
from rollart.config.modes import MODES, Mode
from rollart.policy.staleness import ClaimTime, StalenessBound, timeline
from rollart.types.errors import NegativeStaleness
from rollart.types.versions import Version

ALPHAS = range(6)
INTERRUPTED = (Mode.AREAL, Mode.ROLLART)


# --- the tables of the docstring ------------------------------------------------------------------------------------


def tables() -> dict[str, list[ClaimTime]]:
    """The tables by their headings, such as `rollart, alpha = 1`."""
    found: dict[str, list[ClaimTime]] = {}
    heading = ""
    for line in (rollart.policy.staleness.__doc__ or "").splitlines():
        if re.fullmatch(r" {4}\w+, (alpha = \d|any alpha)", line):
            heading = line.strip()
            found[heading] = []
        elif re.match(r" {4}\d", line):
            claim, served, *lists = re.split(r"\s{2,}", line.strip())
            found[heading].append(
                ClaimTime(int(claim), int(served), *(tuple(map(int, part.split())) for part in lists))
            )
    return found


TABLES = tables()


def test_the_docstring_has_its_tables() -> None:
    assert list(TABLES) == ["rollart, alpha = 1", "rollart, alpha = 0", "rollart, alpha = 2", "sync, any alpha"]
    assert {len(rows) for rows in TABLES.values()} == {4}


@pytest.mark.parametrize("heading", TABLES)
def test_the_tables_are_the_timeline(heading: str) -> None:
    mode, _, rest = heading.partition(", ")
    alphas = ALPHAS if rest == "any alpha" else [int(rest[-1])]
    for alpha in alphas:
        assert timeline(MODES[Mode(mode)], alpha, 4) == TABLES[heading]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_what_the_docstring_says_of_the_other_modes(alpha: int) -> None:
    assert timeline(MODES[Mode.AREAL], alpha, 9) == timeline(MODES[Mode.ROLLART], alpha, 9)
    assert timeline(MODES[Mode.ONE_OFF], alpha, 9) == timeline(MODES[Mode.ROLLART], 0, 9)
    assert timeline(MODES[Mode.SYNC_PLUS], alpha, 9) == timeline(MODES[Mode.SYNC], alpha, 9)


# --- every mode and every alpha -------------------------------------------------------------------------------------

EVERY = [pytest.param(mode, alpha, id=f"{mode}-{alpha}") for mode in Mode for alpha in ALPHAS]


@pytest.mark.parametrize(("mode", "alpha"), EVERY)
def test_staleness_is_within_the_bound_and_lag_one_more_where_training_overlaps(mode: Mode, alpha: int) -> None:
    bound = alpha if mode in INTERRUPTED else 0
    overlap = MODES[mode].overlap
    for row in timeline(MODES[mode], alpha, 20):
        assert max(row.staleness) == min(bound, row.served)
        assert min(row.staleness) == 0
        ahead = 1 if overlap and row.claim else 0
        assert row.claim - row.served == ahead
        assert row.lag == tuple(staleness + ahead for staleness in row.staleness)


@pytest.mark.parametrize(("mode", "alpha"), EVERY)
def test_claims_are_in_order_and_every_version_from_the_oldest_to_the_one_in_service_may_be_in_them(
    mode: Mode, alpha: int
) -> None:
    rows = timeline(MODES[mode], alpha, 20)
    assert [row.claim for row in rows] == list(range(20))
    for row in rows:
        assert row.first == tuple(range(row.first[0], row.served + 1))
        assert row.staleness == tuple(row.served - step for step in row.first)
    for before, after in itertools.pairwise(rows):
        assert 0 <= after.served - before.served <= 1, "one update per claim"
        assert after.first[0] >= before.first[0]


@pytest.mark.parametrize(("mode", "alpha"), EVERY)
def test_the_bound_admits_exactly_the_timeline(mode: Mode, alpha: int) -> None:
    bound = StalenessBound(alpha, check_every_turn=True)
    if mode not in INTERRUPTED:
        return
    for row in timeline(MODES[mode], alpha, 12):
        admitted = [
            step for step in range(row.served + 1) if not bound.violated(Version(0, row.served), Version(0, step))
        ]
        assert admitted == list(row.first)


def test_no_claims_no_rows() -> None:
    assert timeline(MODES[Mode.ROLLART], 1, 0) == []


# --- the bound ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
def test_alpha_steps_are_allowed_and_one_more_is_not(alpha: int) -> None:
    bound = StalenessBound(alpha, check_every_turn=True)
    first = Version(0, 3)
    assert not bound.violated(Version(0, 3), first)
    assert not bound.violated(Version(0, 3 + alpha), first)
    assert bound.violated(Version(0, 3 + alpha + 1), first)


def test_what_has_no_token_has_no_age() -> None:
    assert not StalenessBound(0, check_every_turn=True).violated(Version(0, 100), None)


def test_areal_bounds_what_it_starts_and_finishes_it() -> None:
    assert not StalenessBound(1, MODES[Mode.AREAL].check_every_turn).violated(Version(0, 100), Version(0, 0))


@pytest.mark.parametrize("check_every_turn", [True, False])
def test_a_token_from_the_future_is_a_bug_in_any_mode(check_every_turn: bool) -> None:
    with pytest.raises(NegativeStaleness):
        StalenessBound(5, check_every_turn).violated(Version(0, 1), Version(0, 2))


def test_a_new_epoch_goes_on_counting_steps() -> None:
    bound = StalenessBound(1, check_every_turn=True)
    assert not bound.violated(Version(1, 4), Version(0, 3))
    assert bound.violated(Version(1, 5), Version(0, 3))
