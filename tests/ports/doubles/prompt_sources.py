"""Prompt sources that break one promise each."""

from typing import Any

from rollart.ports.prompts import Cursor
from rollart.tasks.prompts import SeedPrompts
from rollart.types.errors import RequestError


class SkipsOne(SeedPrompts):
    """A resume begins one prompt late."""

    def seek(self, cursor: Cursor) -> None:
        super().seek(cursor)
        self.next()


class LiveCursor(SeedPrompts):
    """The cursor is the source's own state."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._live: Cursor = {}

    def cursor(self) -> Cursor:
        self._live.update(super().cursor())
        return self._live

    def next(self) -> Any:
        prompt = super().next()
        self._live.update(super().cursor())
        return prompt


class TakesAnyCursor(SeedPrompts):
    """A cursor of another source is silently ignored."""

    def seek(self, cursor: Cursor) -> None:
        try:
            super().seek(cursor)
        except RequestError:
            return
