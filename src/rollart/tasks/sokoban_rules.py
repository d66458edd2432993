"""Sokoban without text: rooms, moves, dead cells, generation by reverse play, and a solver.

A cell is a number, `row * width + column`, and a room is surrounded by walls, so that every neighbour of a floor cell
is a cell. Invariants:
- A generated puzzle is solvable, within a number of moves that is known: it was made by playing backwards from the
  solved position.
- A box on a dead cell can never reach a target, so the puzzle is lost. The converse does not hold.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

MOST_TRIES = 1000


class Room(NamedTuple):
    """What does not move."""

    width: int
    height: int
    floor: frozenset[int]
    targets: frozenset[int]

    @property
    def steps(self) -> dict[str, int]:
        """Offset of each move, in the order in which moves are listed."""
        return {"L": -1, "D": self.width, "R": 1, "U": -self.width}


class Position(NamedTuple):
    """What moves. Boxes are sorted."""

    player: int
    boxes: tuple[int, ...]


class Shape(NamedTuple):
    """What puzzles are drawn from."""

    size: int
    """Rows and columns, with the walls around."""
    boxes: int
    walls: tuple[int, int]
    """Fewest and most walls inside."""
    pulls: tuple[int, int]
    """Fewest and most moves of boxes in the reverse play."""
    moves: int
    """Limit of moves; every puzzle has a solution within it."""


def moved(room: Room, position: Position, step: int) -> Position | None:
    """The position after a move; None if a wall or a box that cannot be pushed is in the way."""
    there = position.player + step
    if there not in room.floor:
        return None
    if there not in position.boxes:
        return Position(there, position.boxes)
    behind = there + step
    if behind not in room.floor or behind in position.boxes:
        return None
    return Position(there, tuple(sorted((set(position.boxes) - {there}) | {behind})))


def solved(room: Room, position: Position) -> bool:
    return room.targets.issuperset(position.boxes)


def pushes_needed(room: Room) -> dict[int, int]:
    """For each cell, the fewest pushes that bring a single box from there to a target. Dead cells are missing."""
    distance = dict.fromkeys(sorted(room.targets), 0)
    waiting = deque(distance)
    while waiting:
        cell = waiting.popleft()
        for step in room.steps.values():
            before, player = cell - step, cell - 2 * step
            if before in room.floor and player in room.floor and before not in distance:
                distance[before] = distance[cell] + 1
                waiting.append(before)
    return distance


# --- generation -----------------------------------------------------------------------------------------------------


def puzzle(shape: Shape, chance: random.Random) -> tuple[Room, Position]:
    """A solvable puzzle, with no box on a target."""
    for _ in range(MOST_TRIES):
        room = _room(shape, chance)
        if room is not None and (start := _played_back(room, shape, chance)) is not None:
            return room, start
    raise RuntimeError(f"{MOST_TRIES} rooms gave no puzzle of {shape}")


def _room(shape: Shape, chance: random.Random) -> Room | None:
    """A room whose floor is connected; None if the walls cut it."""
    inside = [row * shape.size + column for row in range(1, shape.size - 1) for column in range(1, shape.size - 1)]
    walls = set(chance.sample(inside, chance.randint(*shape.walls)))
    cells = [cell for cell in inside if cell not in walls]
    room = Room(shape.size, shape.size, frozenset(cells), frozenset(chance.sample(cells, shape.boxes)))
    return room if len(_walks(room, cells[0], ())) == len(cells) else None


def _played_back(room: Room, shape: Shape, chance: random.Random) -> Position | None:
    """Pull boxes off their targets, at random; None if that leads nowhere or took too many moves."""
    boxes = tuple(sorted(room.targets))
    player = chance.choice(sorted(room.floor - room.targets))
    moves = 0
    before = Position(-1, ())
    for _ in range(chance.randint(*shape.pulls)):
        walks = _walks(room, player, boxes)
        ways = [way for way in _pulls(room, walks, boxes) if way[1].boxes != before.boxes]
        if not ways:
            return None
        beside, pulled = chance.choice(ways)
        before = Position(player, boxes)
        moves += walks[beside] + 1
        player, boxes = pulled
    walks = _walks(room, player, boxes)
    start = chance.choice(sorted(walks))
    if moves + walks[start] > shape.moves or room.targets.intersection(boxes):
        return None
    return Position(start, boxes)


def _pulls(room: Room, walks: Mapping[int, int], boxes: tuple[int, ...]) -> Iterator[tuple[int, Position]]:
    """All pulls: where the player stands before, and the position after."""
    for box in boxes:
        for step in room.steps.values():
            beside, back = box - step, box - 2 * step
            if beside in walks and back in room.floor and back not in boxes:
                yield beside, Position(back, tuple(sorted((set(boxes) - {box}) | {beside})))


def _walks(room: Room, start: int, boxes: Iterable[int]) -> dict[int, int]:
    """Number of moves to every cell that the player reaches without a push."""
    blocked = set(boxes)
    found = {start: 0}
    waiting = deque(found)
    while waiting:
        cell = waiting.popleft()
        for step in room.steps.values():
            there = cell + step
            if there in room.floor and there not in blocked and there not in found:
                found[there] = found[cell] + 1
                waiting.append(there)
    return found


# --- solver ---------------------------------------------------------------------------------------------------------


def solution(room: Room, start: Position) -> str | None:
    """A shortest solution, as letters; None if there is none. A*: every missing push is a move at least."""
    needed = pushes_needed(room)

    def missing(position: Position) -> int | None:
        pushes = [needed.get(box) for box in position.boxes]
        return None if None in pushes else sum(each for each in pushes if each is not None)

    bound = missing(start)
    if bound is None:
        return None
    came: dict[Position, tuple[Position, str] | None] = {start: None}
    spent = {start: 0}
    waiting = [(bound, 0, start)]
    while waiting:
        _, negative, here = heappop(waiting)
        if solved(room, here):
            return _letters(came, here)
        if -negative > spent[here]:
            continue
        for letter, step in room.steps.items():
            there = moved(room, here, step)
            if there is None or spent.get(there, 1 << 30) <= spent[here] + 1 or (bound := missing(there)) is None:
                continue
            spent[there] = spent[here] + 1
            came[there] = here, letter
            heappush(waiting, (spent[there] + bound, -spent[there], there))
    return None


def _letters(came: Mapping[Position, tuple[Position, str] | None], end: Position) -> str:
    letters: list[str] = []
    while (step := came[end]) is not None:
        end, letter = step
        letters.append(letter)
    return "".join(reversed(letters))
