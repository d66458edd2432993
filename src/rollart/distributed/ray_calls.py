"""Calls of Ray actors with deadlines, whose errors are those of the method that was called."""

from collections.abc import Awaitable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from rollart.types.errors import WeightError

CALL_S = 60.0


def answer(reference: Any, timeout_s: float) -> Any:
    """Result of a call; raises the error of the method, `RayActorError`, or `WeightError` after the deadline."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayTaskError as error:
        raise cause_of(error) from None
    except GetTimeoutError:
        raise WeightError(f"a part of the weight store has not answered for {timeout_s:g} s") from None


async def answered(reference: Awaitable[Any]) -> Any:
    """Result of a call, for asyncio; raises the error of the method or `RayActorError`."""
    try:
        return await reference
    except RayTaskError as error:
        raise cause_of(error) from None


def cause_of(error: BaseException) -> BaseException:
    """The error that a method raised, through any number of calls."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error
