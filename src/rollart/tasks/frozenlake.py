"""FrozenLake in text: walk over a frozen lake to the goal, without falling into a hole.

The lake is Gymnasium's, not slippery, its map drawn from the prompt's seed; every map has a way to the goal. The reward
is 1 at the goal and 0 otherwise. Whatever the agent says is answered: an answer without a direction is a lost turn.
"""

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from rollart.ports.environment import TextStep
from rollart.types.errors import EnvironmentFault
from rollart.types.trajectory import Prompt

DIRECTIONS = {"L": 0, "D": 1, "R": 2, "U": 3}
"""Gymnasium's numbers of the moves."""
RULES = "Go from A to G over ice F, not into a hole H. Say L, D, R or U."
HINT = "Say L, D, R or U."


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
        self._map = generate_random_map(size=self._size, p=self._ice, seed=prompt.seed)
        self._lake = FrozenLakeEnv(desc=self._map, is_slippery=False)
        self._position = int(self._lake.reset(seed=prompt.seed)[0])
        return self._seen(f"{RULES}\n{self._picture()}")

    def step(self, action: str) -> TextStep:
        if self._lake is None:
            raise EnvironmentFault("step before reset: the lake has no map yet")
        move = next((DIRECTIONS[letter] for letter in action if letter in DIRECTIONS), None)
        if move is None:
            return self._seen(f"{HINT}\n{self._picture()}")
        position, reward, done, _, _ = self._lake.step(move)
        self._position = int(position)
        return self._seen(self._picture(), float(reward), done=bool(done))

    def close(self) -> None:
        if self._lake is not None:
            self._lake.close()
            self._lake = None

    def _seen(self, text: str, reward: float = 0.0, *, done: bool = False) -> TextStep:
        """Where the agent stands is the state, whatever else it is told: all attempts at a prompt have the same map."""
        return TextStep(text, reward, done, state=str(self._position))

    def _picture(self) -> str:
        """The map with the agent as `A`, one row per line."""
        row, column = divmod(self._position, self._size)
        rows = [line.replace("S", "F") for line in self._map]  # the start is ice like any other
        rows[row] = rows[row][:column] + "A" + rows[row][column + 1 :]
        return "\n".join(rows)
