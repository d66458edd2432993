"""The Reward port: a function from what happened to a number.

Hosted by a reward worker, which handles `ScoreRequest`. What a function sees is decided once, by its signature
(`kind_of`), and not by what it returns on some transcript:

    def correct(t: Transcript) -> float                      one trajectory
    def judged(t: Transcript) -> dict[str, float]            one trajectory, in named parts, whose sum counts
    def best_of(group: list[Transcript]) -> list[float]      all members of a group at once

Each may be `async def`. It may block; the time limit is enforced from outside. An exception, or a result that is not a
finite number (one per member, for a group), makes the trajectory `reward_failed`, never a reward of 0.
"""

import enum
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, get_args, get_origin

from rollart.types.errors import RequestError
from rollart.types.transcript import Transcript

Value = float | Mapping[str, float]
TrajectoryReward = Callable[[Transcript], Value | Awaitable[Value]]
GroupReward = Callable[[list[Transcript]], Sequence[float] | Awaitable[Sequence[float]]]
RewardFunction = TrajectoryReward | GroupReward

GROUP_NAMES = frozenset({"group", "members", "transcripts", "trajectories"})
"""Names of a parameter that would be misleading for one transcript: without an annotation they are refused."""


class RewardKind(enum.Enum):
    """What a reward function sees."""

    TRAJECTORY = "one transcript"
    GROUP = "a group"


def kind_of(function: Callable[..., Any], name: str) -> RewardKind:
    """What a function sees, by its signature; one that leaves this open is refused. `name` is for messages.

    >>> def longest(group: list[Transcript]) -> list[float]: ...
    >>> kind_of(longest, "longest")
    <RewardKind.GROUP: 'a group'>
    >>> kind_of(lambda t: 1.0, "brief")
    <RewardKind.TRAJECTORY: 'one transcript'>
    """
    signature = _signature(function, name)
    required = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    positional = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if not positional or required not in ([], positional[:1]):
        raise _refused(name, f"takes {signature}; a reward takes one argument, a transcript or a list of them")
    parameter = positional[0]
    seen = _kind_of_parameter(parameter.annotation, name)
    returned = _kind_of_result(signature.return_annotation)
    if seen is None and returned is None:
        if parameter.name in GROUP_NAMES:
            raise _refused(name, f"does not say whether {parameter.name!r} is one transcript or a group of them")
        return RewardKind.TRAJECTORY
    if seen is not None and returned is not None and seen is not returned:
        raise _refused(name, f"takes {seen.value} and returns what is for {returned.value}")
    return seen or returned or RewardKind.TRAJECTORY


def _signature(function: Callable[..., Any], name: str) -> inspect.Signature:
    if inspect.isclass(function):
        raise _refused(name, "is a class; name a function")
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:
        return inspect.signature(function)  # annotations that exist for type checkers only stay text
    except (TypeError, ValueError) as error:
        raise _refused(name, f"has no signature that can be read ({error})") from error


def _kind_of_parameter(annotation: Any, name: str) -> RewardKind | None:
    """None if it is not annotated."""
    if annotation in (inspect.Parameter.empty, Any):
        return None
    if annotation is Transcript:
        return RewardKind.TRAJECTORY
    origin = get_origin(annotation)
    if inspect.isclass(origin) and issubclass(origin, Sequence) and Transcript in get_args(annotation):
        return RewardKind.GROUP
    if isinstance(annotation, str):
        inner = annotation.rpartition("[")[2].rstrip("] ").rpartition(".")[2]
        if inner.removesuffix(", ..") == "Transcript":
            return RewardKind.GROUP if "[" in annotation else RewardKind.TRAJECTORY
    raise _refused(name, f"takes {annotation!r}, which is neither a Transcript nor a list of them")


def _kind_of_result(annotation: Any) -> RewardKind | None:
    """None if that is left open."""
    if isinstance(annotation, str):
        head = annotation.partition("[")[0].rpartition(".")[2].lower()
        return {
            "float": RewardKind.TRAJECTORY,
            "int": RewardKind.TRAJECTORY,
            "dict": RewardKind.TRAJECTORY,
            "mapping": RewardKind.TRAJECTORY,
            "list": RewardKind.GROUP,
            "sequence": RewardKind.GROUP,
        }.get(head)
    kind = get_origin(annotation) or annotation
    if not inspect.isclass(kind):
        return None
    if issubclass(kind, float | int | Mapping):
        return RewardKind.TRAJECTORY
    return RewardKind.GROUP if issubclass(kind, Sequence) and not issubclass(kind, str) else None


def _refused(name: str, why: str) -> RequestError:
    return RequestError(
        f"reward {name!r} {why}. Annotate it as one of: (t: rollart.Transcript) -> float, "
        "(t: rollart.Transcript) -> dict[str, float], (group: list[rollart.Transcript]) -> list[float]"
    )
