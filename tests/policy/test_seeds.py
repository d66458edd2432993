"""Seeds as a specification: they name a sample, and different samples have different ones."""

from hypothesis import given
from hypothesis import strategies as st

from rollart.policy.seeds import member_key, turn_seed, uniform

number = st.integers(0, 2**63 - 1)


def sampling_seed(run: int, prompt: int, member: int, turn: int) -> int:
    return turn_seed(member_key(run, prompt, member), turn)


def test_the_seeds_are_pinned() -> None:
    """A change of these changes every journal and every sample of every run."""
    assert sampling_seed(0, 0, 0, 0) == 0
    assert sampling_seed(1, 2, 3, 4) == 7553977736955139662
    assert sampling_seed(0, 1_000_000, 7, 29) == 489900185387002195
    assert sampling_seed(2**63, 2**62, 0, 1) == 4784768234016858161


@given(number, number, number, number)
def test_a_seed_fits_63_bits_and_is_the_same_every_time(run: int, prompt: int, member: int, turn: int) -> None:
    seed = sampling_seed(run, prompt, member, turn)
    assert 0 <= seed < 2**63
    assert sampling_seed(run, prompt, member, turn) == seed


def test_every_turn_of_every_member_of_every_prompt_has_its_own() -> None:
    seeds = {
        sampling_seed(7, prompt, member, turn) for prompt in range(40) for member in range(16) for turn in range(30)
    }
    assert len(seeds) == 40 * 16 * 30


def test_parts_do_not_change_places() -> None:
    assert len({sampling_seed(9, 1, 2, 3), sampling_seed(9, 3, 2, 1), sampling_seed(9, 2, 1, 3)}) == 3


def test_another_run_samples_differently() -> None:
    here = {sampling_seed(0, 500, member, turn) for member in range(16) for turn in range(30)}
    there = {sampling_seed(1, 500, member, turn) for member in range(16) for turn in range(30)}
    assert not here & there


def test_numbers_beyond_64_bits_and_negative_ones_wrap() -> None:
    assert sampling_seed(-1, 0, 0, 0) == sampling_seed(2**64 - 1, 0, 0, 0)
    assert sampling_seed(1, 2**64 + 5, 0, 0) == sampling_seed(1, 5, 0, 0)


def test_the_bits_of_a_seed_are_even() -> None:
    """Neighbouring turns differ in about half of their bits, also in the low ones that a small range would take."""
    seeds = [sampling_seed(3, 11, 2, turn) for turn in range(2000)]
    for bit in range(63):
        ones = sum(seed >> bit & 1 for seed in seeds)
        assert 850 < ones < 1150, f"bit {bit}"


@given(number, st.text(), number)
def test_a_draw_is_in_its_interval_and_the_same_every_time(run: int, part: str, count: int) -> None:
    assert 0.0 <= uniform(run, part, count) < 1.0
    assert uniform(run, part, count) == uniform(run, part, count)


def test_draws_are_spread_evenly() -> None:
    draws = [uniform(5, f"slot {part}", count) for part in range(100) for count in range(20)]
    assert len(set(draws)) == 2000
    for tenth in range(10):
        assert 150 < sum(tenth <= 10 * draw < tenth + 1 for draw in draws) < 250
