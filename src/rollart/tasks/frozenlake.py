"""FrozenLake in text: cross a frozen lake to the goal without falling into a hole.

The lake is Gymnasium's, not slippery, with a map drawn from the prompt's seed; every map has a path to the goal. The
agent sees the map once and, at every turn, its position and the moves that avoid a hole: `1,2 open:LRU` is row 1,
column 2, with a hole below. The reward is 1 at the goal and 0 otherwise. An answer without a direction wastes a turn.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from functools import lru_cache

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from rollart.ports.environment import TextStep
from rollart.tasks.split import draw
from rollart.types.errors import EnvironmentFault
from rollart.types.trajectory import Prompt

DIRECTIONS = {"L": 0, "D": 1, "R": 2, "U": 3}
"""Gymnasium's move numbers."""
STEPS = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
"""Row and column offset of each move."""
RULES = "Go from S to G over ice F, not into a hole H. Say L, D, R or U."
HINT = "Say L, D, R or U."
OPEN = "open"
TEXTS = (RULES, HINT, f" {OPEN}")
BLIND_PATH = "DDDRRR"
"""The fixed path that solves the most training maps."""


class FrozenLake:
    """A `TextEnvironment`. The first of the letters L, D, R, U in an answer is the move."""

    def __init__(self, size: int = 4, ice: float = 0.8) -> None:
        self._size = size
        self._ice = ice
        self._lake: FrozenLakeEnv | None = None
        self._map: list[str] = []
        self._position = 0

    def reset(self, prompt: Prompt) -> TextStep:
        self.close()
        layout = draw(prompt, self._layout)
        self._map = layout.splitlines()
        self._lake = copy(_lake(layout))
        self._position = int(self._lake.reset(seed=prompt.seed)[0])
        return self._seen("\n".join([RULES, *self._map, self._around()]))

    def step(self, action: str) -> TextStep:
        if self._lake is None:
            raise EnvironmentFault("step before reset: the lake has no map yet")
        move = next((DIRECTIONS[letter] for letter in action if letter in DIRECTIONS), None)
        if move is None:
            return self._seen(f"{HINT}\n{self._around()}")
        position, reward, done, _, _ = self._lake.step(move)
        self._position = int(position)
        return self._seen(self._around(), float(reward), done=bool(done))

    def close(self) -> None:
        if self._lake is not None:
            self._lake.close()
            self._lake = None

    def _seen(self, text: str, reward: float = 0.0, *, done: bool = False) -> TextStep:
        """The state is the agent's position alone: all attempts at a prompt share one map."""
        return TextStep(text, reward, done, state=str(self._position))

    def _layout(self, seed: int) -> str:
        return _layout(self._size, self._ice, seed)

    def _around(self) -> str:
        """The agent's position, and the moves that stay on the lake and avoid holes."""
        row, column = divmod(self._position, self._size)
        moves = "".join(letter for letter, _, kind in _neighbours(self._map, (row, column)) if kind != "H")
        return f"{row},{column} {OPEN}:{moves}"


# Cached, because all attempts at a prompt share one map.


@lru_cache(maxsize=4096)
def _layout(size: int, ice: float, seed: int) -> str:
    return "\n".join(generate_random_map(size=size, p=ice, seed=seed))


@lru_cache(maxsize=256)
def _lake(layout: str) -> FrozenLakeEnv:
    """A template that is never played on: copies share its move table, which takes longer to build than an episode."""
    return FrozenLakeEnv(desc=layout.splitlines(), is_slippery=False)


# --- scripts --------------------------------------------------------------------------------------------------------

Cell = tuple[int, int]


def any_move(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - ignores the observations
    return chance.choice("LDRU")


def blind_path(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - deterministic
    return BLIND_PATH[(len(observations) - 1) % len(BLIND_PATH)]


def around_holes(observations: Sequence[str], chance: random.Random) -> str:
    """Down or right if there is no hole; if both are blocked, any move that avoids a hole."""
    open_moves = _open_moves(observations[-1])
    return chance.choice([letter for letter in open_moves if letter in "DR"] or open_moves)


def shortest_way(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - deterministic
    rows = observations[0].splitlines()[1:-1]  # after the rules, before the position
    row, _, column = observations[-1].splitlines()[-1].partition(" ")[0].partition(",")
    start = int(row), int(column)
    ways: deque[tuple[Cell, str]] = deque([(start, "")])
    seen = {start}
    while ways:
        cell, first = ways.popleft()
        if rows[cell[0]][cell[1]] == "G":
            return first
        for letter, there, kind in _neighbours(rows, cell):
            if there not in seen and kind != "H":
                seen.add(there)
                ways.append((there, first or letter))
    raise EnvironmentFault(f"the map has no path to the goal: {rows}")


def _open_moves(observation: str) -> list[str]:
    """Moves that avoid holes."""
    return list(observation.rpartition(":")[2])


def _neighbours(rows: Sequence[str], cell: Cell) -> Iterator[tuple[str, Cell, str]]:
    for letter, (down, right) in STEPS.items():
        row, column = cell[0] + down, cell[1] + right
        if 0 <= row < len(rows) and 0 <= column < len(rows):
            yield letter, (row, column), rows[row][column]
