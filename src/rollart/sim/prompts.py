"""Prompts of simulated tasks: numbers, each the seed of everything drawn for it."""

from rollart.ports.prompts import Cursor
from rollart.types.errors import RequestError
from rollart.types.ids import PromptId
from rollart.types.trajectory import Prompt


class CountingPrompts:
    """Endless seeds from `first` on."""

    def __init__(self, task: str, first: int) -> None:
        self._task = task
        self._first = first
        self._taken = 0

    def next(self) -> Prompt:
        seed = self._first + self._taken
        self._taken += 1
        return Prompt(PromptId(f"{self._task}-{seed}"), self._task, seed)

    def cursor(self) -> Cursor:
        return {"task": self._task, "first": self._first, "taken": self._taken}

    def seek(self, cursor: Cursor) -> None:
        taken = cursor.get("taken")
        if cursor.get("task") != self._task or cursor.get("first") != self._first or not isinstance(taken, int):
            raise RequestError(f"{cursor} is not a cursor of the prompts of {self._task} from {self._first}")
        self._taken = taken
