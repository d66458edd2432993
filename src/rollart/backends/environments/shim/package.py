"""Stands for the package `rollart` in an interpreter of its own: what an environment needs of it, and nothing else."""

from typing import Any

from rollart.backends.environments.shim.player import Prompt
from rollart.ports.environment import TextEnvironment, TextStep

__all__ = ["Prompt", "TextEnvironment", "TextStep"]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"rollart.{name} does not exist in an interpreter of its own, which only runs environments: it has "
        f"{', '.join(__all__)}. Use others inside functions, or under if __name__ == '__main__':"
    )
