"""Conformance cases, and how they fail."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

H = TypeVar("H")
"""The harness of a port."""
R = TypeVar("R")
"""Result of running a case: None, or a coroutine for ports that live on an event loop."""


class ConformanceError(AssertionError):
    """The contract was broken; the message quotes the promise and describes what happened instead."""


class NotApplicable(Exception):
    """The implementation declares that it lacks the feature, or the harness cannot set up the situation."""


def check(condition: object, message: str) -> None:
    """Raise `ConformanceError` unless the condition holds."""
    if not condition:
        raise ConformanceError(message)


@dataclass(frozen=True, slots=True)
class Case(Generic[H, R]):
    """One promise of a port. `run` takes a fresh harness and raises `ConformanceError` if the promise is broken."""

    name: str
    promise: str
    run: Callable[[H], R]

    def __str__(self) -> str:
        return self.name


class Suite(Generic[H, R]):
    """Collects the cases of a module, in order of definition."""

    def __init__(self) -> None:
        self._cases: list[Case[H, R]] = []

    def case(self, function: Callable[[H], R]) -> Callable[[H], R]:
        """Register a function: its name is the case's name, its docstring the promise."""
        promise = " ".join((function.__doc__ or "").split())
        self._cases.append(Case(function.__name__, promise, function))
        return function

    def cases(self) -> tuple[Case[H, R], ...]:
        return tuple(self._cases)
