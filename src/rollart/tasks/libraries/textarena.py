"""`textarena:ID`: a game of TextArena, against fixed opponents where it has several players.

    rollart.Task("textarena:TicTacToe-v0", environment_settings={"opponent": "players.py:careful", "seat": 1})

The agent sees what is new to it: messages of the game and moves of others since its last turn. Its reward is the
game's, when the game has ended. A game that an opponent ends by an invalid move is a failure of the environment, as no
merit of the agent. TextArena draws from Python's global generator: here each game has its own state of it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollart.ports.environment import TextStep
from rollart.ports.factory import load
from rollart.tasks.libraries.support import OwnChance, library, no_download, no_nltk_download, unknown
from rollart.types.errors import EnvironmentFault, RequestError

if TYPE_CHECKING:  # where environments have an interpreter of their own, there is no msgspec
    from rollart.types.trajectory import Prompt

PACKAGE = "textarena"
RANDOM = "random"
RAW = "-raw"
"""Suffix of ids without the library's wrappers, which repeat the whole history in every observation."""
LONGEST = 10_000
"""Moves of opponents after which a game is broken."""
_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
_SENDER = re.compile(r"\[(?:GAME|Player \d+)\]")

Opponent = Callable[[str], str]
"""Sees what is new to it, and answers with a move."""


class TextArena:
    """A `TextEnvironment`.

    `players`: their number, 1 or 2 by default as the game requires. `seat`: the agent's player number. `opponent`: a
    factory path of a function from observation to move, or `random`, which picks one of the moves in brackets that it
    was shown last. `settings`: keywords of `textarena.make`.
    """

    def __init__(
        self,
        id: str,
        settings: Mapping[str, Any] | None = None,
        players: int = 0,
        seat: int = 0,
        opponent: str = RANDOM,
    ) -> None:
        self._id = id
        self._chance = OwnChance()
        with self._chance.used(), no_nltk_download(), no_download(f"textarena:{id}"):
            textarena = library("textarena", PACKAGE)
            known = textarena.envs.registration.ENV_REGISTRY
            if id not in known:
                raise unknown("textarena", id, [name for name in known if not name.endswith(RAW)])
            self._game = textarena.make(f"{id}{RAW}" if f"{id}{RAW}" in known else id, **(settings or {}))
        self._kinds = textarena.ObservationType
        self._players = players
        self._seat = seat
        self._opponent_path = opponent
        self._opponent: Opponent | None = None if opponent == RANDOM else load(opponent)
        self._shown = ""
        self._seen: dict[int, str] = {}
        """What opponents were shown last with moves in it."""
        if players and seat >= players:
            raise RequestError(f"textarena:{id}: seat is {seat}; with {players} players it is below that")

    def reset(self, prompt: Prompt) -> TextStep:
        self._chance.seed(prompt.seed)
        self._opponents_chance = random.Random(prompt.seed)
        self._seen.clear()
        with self._chance.used(), no_nltk_download(), no_download(f"textarena:{self._id}"):
            self._start(prompt.seed)
        shown, done = self._until_turn(False)
        if done:
            return self._result(shown)._replace(done=True)
        return TextStep(shown)

    def step(self, action: str) -> TextStep:
        with self._chance.used():
            done, _ = self._game.step(_bracketed(action))
        shown, done = self._until_turn(bool(done))
        return self._result(shown) if done else TextStep(shown)

    def close(self) -> None:
        """Nothing is held: the library's `close` gives the rewards."""

    def random_action(self, seed: int) -> str:
        return _random_move(self._shown, random.Random(seed))

    def _start(self, seed: int) -> None:
        """With the fewest players that the game takes, unless their number is given."""
        numbers = [self._players] if self._players else [self._seat + 1, self._seat + 2, 3, 4, 5, 6]
        problem: Exception | None = None
        for players in numbers:
            try:
                self._game.reset(num_players=players, seed=seed)
            except (AssertionError, ValueError) as error:
                problem = problem or error
            else:
                self._players = players
                return
        raise RequestError(f"textarena:{self._id} does not start with {numbers} players: {problem}")

    def _until_turn(self, done: bool) -> tuple[str, bool]:
        """Let opponents move until it is the agent's turn or the game is over; what the agent sees then."""
        for _ in range(LONGEST):
            if done:
                return self._new_to(self._seat, None), True
            with self._chance.used():
                player, observation = self._game.get_observation()
            if player == self._seat:
                self._shown = self._new_to(player, observation)
                return self._shown, False
            move = self._opponents_move(player, self._new_to(player, observation))
            with self._chance.used():
                done, _ = self._game.step(_bracketed(move))
            if done and self._info(player).get("invalid_move"):
                raise EnvironmentFault(f"the opponent {self._opponent_path} made an invalid move: {move[:100]!r}")
        raise EnvironmentFault(f"opponents made {LONGEST:,} moves without a turn of the agent")

    def _opponents_move(self, player: int, shown: str) -> str:
        if self._opponent is not None:
            return str(self._opponent(shown))
        if _MOVE.search(_SENDER.sub("", shown)):
            self._seen[player] = shown
        return _random_move(self._seen.get(player, shown), self._opponents_chance)

    def _new_to(self, player: int, observation: Any) -> str:
        """Messages as text; a string comes from wrappers of the library and is the whole."""
        if observation is None:
            observation = self._game.state.observations.get(player, [])
        if isinstance(observation, str):
            return str(observation)
        kinds, lines = self._kinds, []
        for sender, message, kind in observation:
            if kind is kinds.PLAYER_ACTION and sender == player:
                continue  # the agent's own answer, which it has
            lines.append(f"[Player {sender}] {message}" if kind is kinds.PLAYER_ACTION else str(message))
        return "\n".join(lines).strip()

    def _info(self, player: int) -> Mapping[str, Any]:
        info = self._game.state.game_info
        return info.get(player, {}) if isinstance(info, Mapping) else {}

    def _result(self, shown: str) -> TextStep:
        rewards, _ = self._game.close()
        if rewards is None or self._seat not in rewards:
            raise EnvironmentFault(f"textarena:{self._id} ended without a reward for player {self._seat}")
        return TextStep(shown, float(rewards[self._seat]), done=True)


def _bracketed(action: str) -> str:
    return action if "[" in action and "]" in action else f"[{action.strip()}]"


def _random_move(shown: str, chance: random.Random) -> str:
    """One of the moves in brackets of the last paragraph that has several, else of any; else a number."""
    for text in (*reversed(shown.split("\n\n")), shown):
        moves = _MOVE.findall(_SENDER.sub("", text))
        if len(set(moves)) > 1 or (moves and text is shown):
            return str(chance.choice(moves))
    return f"[{chance.randrange(10)}]"
