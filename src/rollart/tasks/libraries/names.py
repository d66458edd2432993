"""Environments of libraries by name: `gym:FrozenLake-v1` in place of a factory path.

A prefix stands for the adapter of a library; the rest is the name that the library gives the environment.

>>> resolve("reasoning_gym:letter_counting", {"max_words": 5})
('rollart.tasks.libraries.reasoning_gym:ReasoningGym', {'id': 'letter_counting', 'max_words': 5})
>>> resolve("maze.py:Maze", {"size": 4})
('maze.py:Maze', {'size': 4})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LIBRARIES = {
    "gym": "rollart.tasks.libraries.gymnasium:Gymnasium",
    "gem": "rollart.tasks.libraries.gem:Gem",
    "textarena": "rollart.tasks.libraries.textarena:TextArena",
    "reasoning_gym": "rollart.tasks.libraries.reasoning_gym:ReasoningGym",
    "openenv": "rollart.tasks.libraries.openenv:OpenEnv",
    "harbor": "rollart.tasks.harbor.environment:Harbor",
}
"""Prefixes, and factories that take the rest as `id`."""


def library_of(environment: str) -> str:
    """The prefix of an environment of a library; empty for a factory path."""
    prefix, colon, _ = environment.partition(":")
    return prefix if colon and prefix in LIBRARIES else ""


def resolve(environment: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Factory path and keywords of an environment."""
    prefix = library_of(environment)
    if not prefix:
        return environment, dict(settings)
    return LIBRARIES[prefix], {"id": environment.partition(":")[2], **settings}
