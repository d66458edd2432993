"""The PromptSource port: a source of prompts with a cursor, so that a resume neither skips nor repeats one."""

from typing import Any, Protocol

from rollart.types.trajectory import Prompt

Cursor = dict[str, Any]
"""Position of a source: plain JSON values, written to the journal and to checkpoints."""


class PromptSource(Protocol):
    """An endless, deterministic stream of one task's prompts."""

    def next(self) -> Prompt:
        """Return the next prompt and advance the cursor by one."""
        ...

    def cursor(self) -> Cursor:
        """Current position. A value: later calls of `next` do not change it."""
        ...

    def seek(self, cursor: Cursor) -> None:
        """Return to the position of `cursor`; the prompts from there on are the same. A foreign cursor is refused."""
        ...
