"""The PromptSource port: where prompts come from, with a cursor, so that a resume neither skips nor repeats one."""

from typing import Any, Protocol

from rollart.types.trajectory import Prompt

Cursor = dict[str, Any]
"""Where a source stands: plain JSON values, written to the journal and to checkpoints."""


class PromptSource(Protocol):
    """An endless, deterministic stream of one task's prompts."""

    def next(self) -> Prompt:
        """The next prompt; moves the cursor by one."""
        ...

    def cursor(self) -> Cursor:
        """Where the source stands. A value: later calls of `next` do not change it."""
        ...

    def seek(self, cursor: Cursor) -> None:
        """Go to where `cursor` was taken; the prompts from there on are the same. A foreign cursor is refused."""
        ...
