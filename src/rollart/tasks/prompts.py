"""Prompts from seeds: for tasks that make an episode out of a number. Prompts from files: `prompt_files`.

What holds of all of them: in every pass each prompt comes once, in an order that depends on the source's seed and the
number of the pass alone, in every process and with every version of Python; a cursor of another source is refused.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

from rollart.ports.prompts import Cursor
from rollart.tasks.split import HELD_OUT
from rollart.types.errors import RequestError
from rollart.types.ids import PromptId
from rollart.types.trajectory import Prompt


class ShuffledPrompts(ABC):
    """A `PromptSource` over numbered items, over and over, shuffled anew in every pass."""

    def __init__(self, numbers: Sequence[int], identity: Cursor, shuffle_seed: int) -> None:
        self._numbers = numbers
        self._identity = {**identity, "shuffle_seed": shuffle_seed}
        """What a cursor has in common with all others of the same source."""
        self._shuffle_seed = shuffle_seed
        self._pass = 0
        self._index = 0
        self._order = self._shuffled(0)

    @abstractmethod
    def _prompt(self, number: int) -> Prompt:
        """The prompt of an item."""

    def next(self) -> Prompt:
        number = self._order[self._index]
        self._index += 1
        if self._index == len(self._numbers):
            self._pass += 1
            self._index = 0
            self._order = self._shuffled(self._pass)
        return self._prompt(number)

    def cursor(self) -> Cursor:
        return {**self._identity, "pass": self._pass, "index": self._index}

    def seek(self, cursor: Cursor) -> None:
        own = self._identity
        keys = (own.keys() | cursor.keys()) - {"pass", "index"}
        differing = {key: cursor.get(key) for key in sorted(keys) if cursor.get(key) != own.get(key)}
        if differing:
            raise RequestError(
                f"the cursor is of another prompt source: it has {differing}, this one {own}. "
                "Resume with the prompts the run was started with, or start a new run."
            )
        number, index = cursor.get("pass"), cursor.get("index")
        if not (isinstance(number, int) and isinstance(index, int) and number >= 0 and 0 <= index < len(self._numbers)):
            raise RequestError(f"the cursor {cursor} is damaged: pass {number!r}, index {index!r}")
        self._pass, self._index = number, index
        self._order = self._shuffled(number)

    def _shuffled(self, number: int) -> list[int]:
        """By hash: the generators of libraries promise no order across versions, and a resume needs the same."""

        def rank(item: int) -> bytes:
            return hashlib.blake2b(f"{self._shuffle_seed}/{number}/{item}".encode(), digest_size=8).digest()

        return sorted(self._numbers, key=rank)


class SeedPrompts(ShuffledPrompts):
    """The seeds `start … start + count − 1` of a task.

    `held_out`: asks the task for held-out content (True) or training content (False); None for any (see `split`).

    >>> source = SeedPrompts("maze", start=100, count=3)
    >>> sorted(source.next().seed for _ in range(3))
    [100, 101, 102]
    """

    def __init__(
        self, task: str, start: int, count: int, *, shuffle_seed: int = 0, held_out: bool | None = None
    ) -> None:
        if count < 1 or start < 0:
            raise RequestError(f"prompts of {task!r}: start {start} and count {count}; use start ≥ 0 and count ≥ 1")
        self._task = task
        self._data = {} if held_out is None else {HELD_OUT: held_out}
        identity = {"task": task, "start": start, "count": count, **self._data}
        super().__init__(range(start, start + count), identity, shuffle_seed)

    def _prompt(self, number: int) -> Prompt:
        return Prompt(id=PromptId(str(number)), task=self._task, seed=number, data=self._data)
