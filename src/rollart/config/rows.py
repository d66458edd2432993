"""Prompts given from Python, as JSON lines. A run keeps them in its folder, so that a resume needs nothing else."""

from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

RUN_FOLDER = "{run}/"
"""Begins paths of a config that are relative to the folder of its run."""


class Rows:
    """Rows that were read once: one JSON object per line."""

    __slots__ = ("lines",)

    def __init__(self, lines: bytes) -> None:
        self.lines = lines

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and other.lines == self.lines

    def __hash__(self) -> int:
        return hash(self.lines)

    def __repr__(self) -> str:
        return f"<{len(self.lines.splitlines())} rows>"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.is_instance_schema(cls)
