"""Prompts from seeds: for tasks that make an episode out of a number.

What holds: in every pass each seed of the range comes once, in an order that depends on the source's seed and the
number of the pass alone, in every process and with every version of Python.
"""

import hashlib

from rollart.ports.prompts import Cursor
from rollart.types.errors import RequestError
from rollart.types.ids import PromptId
from rollart.types.trajectory import Prompt


class SeedPrompts:
    """The seeds `start … start + count − 1` of a task, over and over, shuffled anew in every pass.

    >>> source = SeedPrompts("maze", start=100, count=3)
    >>> sorted(source.next().seed for _ in range(3))
    [100, 101, 102]
    """

    def __init__(self, task: str, start: int, count: int, *, shuffle_seed: int = 0) -> None:
        if count < 1 or start < 0:
            raise RequestError(f"prompts of {task!r}: start {start} and count {count}; use start ≥ 0 and count ≥ 1")
        self._task = task
        self._start = start
        self._count = count
        self._shuffle_seed = shuffle_seed
        self._pass = 0
        self._index = 0
        self._order = self._shuffled(0)

    def next(self) -> Prompt:
        seed = self._order[self._index]
        self._index += 1
        if self._index == self._count:
            self._pass += 1
            self._index = 0
            self._order = self._shuffled(self._pass)
        return Prompt(id=PromptId(str(seed)), task=self._task, seed=seed)

    def cursor(self) -> Cursor:
        return {**self._identity(), "pass": self._pass, "index": self._index}

    def seek(self, cursor: Cursor) -> None:
        own = self._identity()
        differing = {key: cursor.get(key) for key, value in own.items() if cursor.get(key) != value}
        if differing:
            raise RequestError(
                f"the cursor is of another prompt source: it has {differing}, this one {own}. "
                "Resume with the prompts the run was started with, or start a new run."
            )
        number, index = cursor.get("pass"), cursor.get("index")
        if not (isinstance(number, int) and isinstance(index, int) and number >= 0 and 0 <= index < self._count):
            raise RequestError(f"the cursor {cursor} is damaged: pass {number!r}, index {index!r}")
        self._pass, self._index = number, index
        self._order = self._shuffled(number)

    def _identity(self) -> Cursor:
        return {
            "task": self._task,
            "start": self._start,
            "count": self._count,
            "shuffle_seed": self._shuffle_seed,
        }

    def _shuffled(self, number: int) -> list[int]:
        """By hash: the generators of libraries promise no order across versions, and a resume needs the same."""

        def rank(seed: int) -> bytes:
            return hashlib.blake2b(f"{self._shuffle_seed}/{number}/{seed}".encode(), digest_size=8).digest()

        return sorted(range(self._start, self._start + self._count), key=rank)


def held_out(task: str, start: int, count: int, held: int, *, shuffle_seed: int = 0) -> tuple[SeedPrompts, SeedPrompts]:
    """The range in two disjoint parts: prompts to train on, and the last `held` seeds to evaluate on."""
    if not 0 < held < count:
        raise RequestError(f"prompts of {task!r}: cannot hold out {held} of {count}; leave at least one for each part")
    train = SeedPrompts(task, start, count - held, shuffle_seed=shuffle_seed)
    return train, SeedPrompts(task, start + count - held, held, shuffle_seed=shuffle_seed)
