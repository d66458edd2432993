"""Sokoban in text: push every box onto a target.

    Push each $ onto a . with L, D, R or U.
    ######
    #-@--#        # wall   - floor   . target
    #-$#-#        @ player   + player on a target
    #---.#        $ box      * box on a target
    #----#
    ######
    @12 $D1-0 .D1R2 open:LDR

The last line comes at every turn: the cell (row, column) of the player, for each box how far it is from the player and
how far its closest target is from the box, and the moves that are not blocked. From level 2 on the map comes at every
turn too. An answer is one move or several, such as `RRD`; one without a move wastes a turn.

Reward: the puzzle has a score, an eighth per box on a target, and 1 when it is solved. A turn earns the change of the
score, so that pushing a box on and off a target earns nothing. The episode ends when the puzzle is solved, when a box
is on a cell from which no target can be reached (a deadlock; `deadlock="continue"` lets it go on), and, truncated, when
the moves are used up. Not all deadlocks are noticed: two boxes may block each other.
"""

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from rollart.ports.environment import TextStep
from rollart.tasks.sokoban_rules import Position, Room, Shape, moved, pushes_needed, puzzle, solution, solved
from rollart.tasks.split import draw
from rollart.types.errors import EnvironmentFault, RequestError
from rollart.types.trajectory import Prompt

LEVELS = {
    1: Shape(size=6, boxes=1, walls=(0, 3), pulls=(2, 6), moves=20),
    2: Shape(size=7, boxes=2, walls=(1, 5), pulls=(5, 12), moves=60),
    3: Shape(size=8, boxes=3, walls=(3, 8), pulls=(8, 20), moves=120),
}
RULES = "Push each $ onto a . with L, D, R or U."
HINT = "Say L, D, R or U."
OPEN = "open"
SOLVED, STUCK, SPENT = "solved", "stuck", "no moves left"
TEXTS = (RULES, HINT, f" {OPEN}", SOLVED, STUCK, SPENT)
ON_TARGET = 1 / 8
"""Score of a box on a target while others are not; a power of two, so that rewards add up exactly."""
_MOVES = re.compile(r"\b[LDRU]+\b")


class Sokoban:
    """A `TextEnvironment`. `level` is a key of `LEVELS`."""

    def __init__(self, level: int = 1, deadlock: Literal["end", "continue"] = "end") -> None:
        if level not in LEVELS:
            raise RequestError(f"sokoban has no level {level!r}; levels are {', '.join(map(str, LEVELS))}")
        if deadlock not in ("end", "continue"):
            raise RequestError(f"deadlock {deadlock!r}: use 'end' or 'continue'")
        self._level = level
        self._ends_stuck = deadlock == "end"
        self._room: Room | None = None
        self._position = Position(0, ())
        self._alive: frozenset[int] = frozenset()
        """Cells from which a box can reach a target."""
        self._left = 0

    def reset(self, prompt: Prompt) -> TextStep:
        layout = draw(prompt, self._layout)
        self._room, self._position = parsed(layout)
        self._alive = _alive(self._room)
        self._left = LEVELS[self._level].moves
        return self._seen(f"{RULES}\n{layout}\n{self._line()}")

    def step(self, action: str) -> TextStep:
        if self._room is None or not self._left:
            raise EnvironmentFault("step before reset: there is no puzzle")
        found = _MOVES.search(action)
        if found is None:
            return self._seen(f"{HINT}\n{self._line()}")
        before = self._score()
        ended = ""
        for letter in found[0]:
            position = moved(self._room, self._position, self._room.steps[letter])
            self._position = position or self._position
            self._left -= 1
            ended = self._ended()
            if ended:
                break
        earned = self._score() - before
        if ended:
            self._left = 0
            return TextStep(ended, earned, done=True, truncated=ended == SPENT, state=self._state())
        text = self._line() if self._level == 1 else f"{picture(self._room, self._position)}\n{self._line()}"
        return self._seen(text, earned)

    def close(self) -> None:
        self._room = None

    def _ended(self) -> str:
        """How the episode has ended; empty if it has not."""
        assert self._room is not None
        if solved(self._room, self._position):
            return SOLVED
        if self._ends_stuck and not self._alive.issuperset(self._position.boxes):
            return STUCK
        return "" if self._left else SPENT

    def _score(self) -> float:
        assert self._room is not None
        if solved(self._room, self._position):
            return 1.0
        return ON_TARGET * len(self._room.targets.intersection(self._position.boxes))

    def _seen(self, text: str, reward: float = 0.0) -> TextStep:
        return TextStep(text, reward, state=self._state())

    def _state(self) -> str:
        """Positions alone: all attempts at a prompt share one room."""
        return " ".join(map(str, (self._position.player, *self._position.boxes)))

    def _line(self) -> str:
        assert self._room is not None
        room, position = self._room, self._position
        cells = ["@{}{}".format(*divmod(position.player, room.width))]
        for box in position.boxes:
            _, target = min((_distance(room, box, each), each) for each in room.targets)
            sign = "*" if box == target else "$"
            cells += [f"{sign}{offset(room, position.player, box)}", f".{offset(room, box, target)}"]
        moves = "".join(letter for letter, step in room.steps.items() if moved(room, position, step) is not None)
        return f"{' '.join(cells)} {OPEN}:{moves}"

    def _layout(self, seed: int) -> str:
        return _layout(self._level, seed)


# Cached, because all attempts at a prompt share one puzzle.


@lru_cache(maxsize=4096)
def _layout(level: int, seed: int) -> str:
    return picture(*puzzle(LEVELS[level], random.Random(seed)))


@lru_cache(maxsize=256)
def _alive(room: Room) -> frozenset[int]:
    return frozenset(pushes_needed(room))


def picture(room: Room, position: Position) -> str:
    """The map, as in the module's docstring."""
    rows = []
    for row in range(room.height):
        signs = []
        for cell in range(row * room.width, (row + 1) * room.width):
            on_target = cell in room.targets
            if cell == position.player:
                signs.append("+" if on_target else "@")
            elif cell in position.boxes:
                signs.append("*" if on_target else "$")
            elif cell in room.floor:
                signs.append("." if on_target else "-")
            else:
                signs.append("#")
        rows.append("".join(signs))
    return "\n".join(rows)


def parsed(layout: str) -> tuple[Room, Position]:
    """The inverse of `picture`.

    >>> picture(*parsed("#####\\n#@$.#\\n#####"))
    '#####\\n#@$.#\\n#####'
    """
    rows = layout.splitlines()
    signs = dict(enumerate("".join(rows)))

    def cells(wanted: str) -> list[int]:
        return [cell for cell, sign in signs.items() if sign in wanted]

    room = Room(len(rows[0]), len(rows), frozenset(cells("-.@+$*")), frozenset(cells(".+*")))
    return room, Position(cells("@+")[0], tuple(cells("$*")))


def offset(room: Room, start: int, end: int) -> str:
    """How to get from a cell to another; `-0` for a direction in which there is nothing to go.

    >>> offset(Room(6, 6, frozenset(), frozenset()), 8, 13), offset(Room(6, 6, frozenset(), frozenset()), 8, 10)
    ('D1L1', '-0R2')
    """
    down, right = end // room.width - start // room.width, end % room.width - start % room.width
    vertical = f"{'D' if down > 0 else 'U'}{abs(down)}" if down else "-0"
    return vertical + (f"{'R' if right > 0 else 'L'}{abs(right)}" if right else "-0")


def _distance(room: Room, one: int, other: int) -> int:
    (row, column), (other_row, other_column) = divmod(one, room.width), divmod(other, room.width)
    return abs(row - other_row) + abs(column - other_column)


# --- scripts --------------------------------------------------------------------------------------------------------


def any_move(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - ignores the observations
    return chance.choice("LDRU")


def open_move(observations: Sequence[str], chance: random.Random) -> str:
    """Any move that is not blocked."""
    return chance.choice(observations[-1].rpartition(":")[2])


def greedy(observations: Sequence[str], chance: random.Random) -> str:
    """Push a box closer to a target where a push does that at once, else any open move that loses nothing."""
    room, position = _read(observations)
    needed = pushes_needed(room)
    before = sum(needed[box] for box in position.boxes if box in needed)
    closer: list[str] = []
    harmless: list[str] = []
    for letter, step in room.steps.items():
        there = moved(room, position, step)
        if there is None or any(box not in needed for box in there.boxes):
            continue
        after = sum(needed[box] for box in there.boxes)
        if after <= before:
            (closer if after < before else harmless).append(letter)
    return chance.choice(closer or harmless or list("LDRU"))


def solver(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001 - deterministic
    """The moves of a shortest solution, one by one."""
    moves = _solution(*_read(observations[:1]))
    if moves is None:
        raise EnvironmentFault(f"the puzzle has no solution: {observations[0]}")
    return moves[len(observations) - 1]


def careless_solver(observations: Sequence[str], chance: random.Random) -> str:
    """The first of the letters that begins a shortest solution from here, or any open move."""
    room, position = _read(observations)
    moves = "" if chance.random() < CARELESSNESS else _solution(room, position)
    if not moves:
        return open_move(observations, chance)
    for letter, step in room.steps.items():
        there = moved(room, position, step)
        rest = None if there is None else _solution(room, there)
        if rest is not None and len(rest) < len(moves):
            return letter
    raise EnvironmentFault(f"no move begins {moves!r}")


CARELESSNESS = 0.2
"""Probability per turn that `careless_solver` makes any open move."""


@lru_cache(maxsize=65536)
def _solution(room: Room, position: Position) -> str | None:
    return solution(room, position)


def _read(observations: Sequence[str]) -> tuple[Room, Position]:
    """The room from the first observation, the position from the last line of the last one."""
    room, _ = parsed(observations[0].partition("\n")[2].rpartition("\n")[0])
    at, *others = observations[-1].rpartition("\n")[2].rpartition(f" {OPEN}:")[0].split()
    player = int(at[1]) * room.width + int(at[2])
    boxes = [player + _cells(room, each[1:]) for each in others if each[0] in "$*"]
    return room, Position(player, tuple(boxes))


def _cells(room: Room, offset: str) -> int:
    """The difference between two cells, from an offset."""
    return sum(room.steps.get(offset[place], 0) * int(offset[place + 1]) for place in (0, 2))
