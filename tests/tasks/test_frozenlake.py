from collections import deque

import pytest

from rollart.tasks.frozenlake import HINT, FrozenLake
from rollart.types.errors import EnvironmentFault
from rollart.types.trajectory import Prompt

MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}


def prompt(seed):
    return Prompt(str(seed), "frozenlake", seed)


def map_of(first):
    """The map in the first observation: after the rules, before the position."""
    return first.observation.splitlines()[1:-1]


def where(step):
    row, column = step.observation.splitlines()[-1].split()[0].split(",")
    return int(row), int(column)


def test_an_observation_says_where_the_agent_stands_and_where_it_can_go():
    lake = FrozenLake()
    for seed in range(5):
        step = lake.reset(prompt(seed))
        rows = map_of(step)
        assert (rows[0][0], rows[3][3]) == ("S", "G")
        for move in way(rows, "G"):
            row, column = where(step)
            moves = {
                letter
                for letter, (down, right) in MOVES.items()
                if 0 <= row + down < 4 and 0 <= column + right < 4 and rows[row + down][column + right] != "H"
            }
            assert set(step.observation.rpartition("open:")[2]) == moves
            step = lake.step(move)


def test_the_state_is_where_the_agent_stands():
    """Also where the observation has rules or a hint besides the place."""
    lake = FrozenLake(size=2, ice=1.0)
    start, lost, right, back = lake.reset(prompt(1)), lake.step("?"), lake.step("R"), lake.step("L")
    assert len({start.observation, lost.observation, back.observation}) == 3
    assert start.state == lost.state == back.state != right.state
    assert all(step.state for step in (start, right))


def way(rows, target):
    """The shortest list of moves over ice to the first cell of a kind."""
    start = (0, 0)
    queue = deque([(start, "")])
    seen = {start}
    while queue:
        (r, c), moves = queue.popleft()
        if rows[r][c] == target:
            return moves
        if rows[r][c] == "H":
            continue
        for letter, (dr, dc) in MOVES.items():
            there = (r + dr, c + dc)
            if there not in seen and 0 <= there[0] < 4 and 0 <= there[1] < 4:
                seen.add(there)
                queue.append((there, moves + letter))
    return None


@pytest.mark.parametrize("seed", range(12))
def test_every_map_has_a_way_to_the_goal(seed):
    lake = FrozenLake()
    moves = way(map_of(lake.reset(prompt(seed))), "G")
    for move in moves[:-1]:
        step = lake.step(move)
        assert (step.reward, step.done) == (0.0, False)
    step = lake.step(moves[-1])
    assert (step.reward, step.done, step.truncated) == (1.0, True, False)


def test_a_hole_ends_it_without_reward():
    lake = FrozenLake()
    seed, moves = next(
        (seed, moves) for seed in range(20) if (moves := way(map_of(lake.reset(prompt(seed))), "H")) is not None
    )
    lake.reset(prompt(seed))
    for move in moves:
        step = lake.step(move)
    assert (step.reward, step.done) == (0.0, True)


def test_the_seed_is_the_map():
    pictures = {FrozenLake().reset(prompt(seed)).observation for seed in range(10)}
    assert len(pictures) > 5
    assert FrozenLake().reset(prompt(3)) == FrozenLake().reset(prompt(3))


def test_the_first_letter_counts_and_nonsense_is_answered():
    lake = FrozenLake()
    assert where(lake.reset(prompt(3))) == (0, 0)
    for nonsense in ("", "hm", "\N{REPLACEMENT CHARACTER}", "left"):
        step = lake.step(nonsense)
        assert step.observation.startswith(HINT)
        assert where(step) == (0, 0)
        assert (step.reward, step.done) == (0.0, False)
    assert where(lake.step("I go D, not R")) == (1, 0)
    assert where(lake.step("U")) == (0, 0)
    assert where(lake.step("L")) == (0, 0)


def test_it_can_be_closed_at_any_time():
    lake = FrozenLake()
    lake.close()
    with pytest.raises(EnvironmentFault, match="reset"):
        lake.step("R")
    lake.reset(prompt(1))
    lake.close()
    lake.close()
