"""Prompts from seeds, for tasks that generate an episode from a number. Prompts from files: `prompt_files`.

Invariants of every source:
- Each pass yields every prompt once, in an order that depends only on the source's seed and the number of the pass, in
  every process and with every version of Python.
- A cursor of a different source is refused.
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
    """A `PromptSource` that cycles over numbered items, reshuffled in every pass."""

    def __init__(self, numbers: Sequence[int], identity: Cursor, shuffle_seed: int) -> None:
        self._numbers = numbers
        self._identity = {**identity, "shuffle_seed": shuffle_seed}
        """The part that all cursors of this source share."""
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
                f"the cursor belongs to another prompt source: it has {differing}, this one {own}. "
                "Resume with the prompts the run was started with, or start a new run."
            )
        number, index = cursor.get("pass"), cursor.get("index")
        if not (isinstance(number, int) and isinstance(index, int) and number >= 0 and 0 <= index < len(self._numbers)):
            raise RequestError(f"the cursor {cursor} is damaged: pass {number!r}, index {index!r}")
        self._pass, self._index = number, index
        self._order = self._shuffled(number)

    def _shuffled(self, number: int) -> list[int]:
        """Sort by hash: library generators guarantee no order across versions, and a resume needs the same one."""

        def rank(item: int) -> bytes:
            return hashlib.blake2b(f"{self._shuffle_seed}/{number}/{item}".encode(), digest_size=8).digest()

        return sorted(self._numbers, key=rank)


class SeedPrompts(ShuffledPrompts):
    """The seeds `start … start + count − 1` of a task.

    `held_out` asks the task for held-out content (True), training content (False) or either (None); see `split`.

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


class NoPrompts:
    """A source without prompts: of a task whose data has none to hold out, and that is never evaluated."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def next(self) -> Prompt:
        raise RequestError(self.reason)

    def cursor(self) -> Cursor:
        return {}

    def seek(self, cursor: Cursor) -> None:
        """There is one position only."""
