"""Text for the spaces of Gymnasium: how an observation is shown, what an action looks like, how it is read.

| space | observation | action |
|---|---|---|
| `Discrete` | `3` | the first number of the answer, or the name of an action |
| `Box` | `[0.12, -1.5]`, a line per row | as many numbers as it has, within its bounds |
| `MultiDiscrete`, `MultiBinary` | `[0, 2, 1]` | as many numbers as it has |
| `Text` | the text | the answer |
| `Tuple`, `Dict` | `12, 5, 0`, `name: value` in lines | not supported |
| others | not supported | not supported |
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rollart.types.errors import RequestError

LARGEST = 1000
"""Numbers of an observation beyond which it is an image, which is not text."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_WHOLE = re.compile(r"-?\d+")


def kind(space: Any) -> str:
    return type(space).__name__


def check_shown(space: Any) -> None:
    """Refuse observations that have no text."""
    match kind(space):
        case "Tuple":
            for part in space.spaces:
                check_shown(part)
        case "Dict":
            for part in space.spaces.values():
                check_shown(part)
        case "Box" if _size(space) > LARGEST:
            raise RequestError(
                f"an observation of shape {space.shape} is an image or too long for text; set `render_text` to a "
                "function that shows it as text"
            )
        case "Box" | "Discrete" | "MultiDiscrete" | "MultiBinary" | "Text":
            pass
        case "MissionSpace":  # of minigrid: a text
            pass
        case other:
            raise RequestError(f"observations of space {other} have no text; set `render_text` to a function")


def shown(space: Any, value: Any, digits: int = 4) -> str:
    """An observation as text."""
    match kind(space):
        case "Tuple":
            return ", ".join(shown(part, each, digits) for part, each in zip(space.spaces, value))  # noqa: B905 - 3.10
        case "Dict":
            lines = (f"{name}: {shown(part, value[name], digits)}" for name, part in space.spaces.items())
            return "\n".join(lines)
        case "Box":
            return _numbers(value.tolist() if hasattr(value, "tolist") else value, digits)
        case "MultiDiscrete" | "MultiBinary":
            return json.dumps(value.tolist() if hasattr(value, "tolist") else list(value))
    return str(value)


def check_played(space: Any) -> None:
    """Refuse actions that have no text."""
    if kind(space) not in ("Discrete", "Box", "MultiDiscrete", "MultiBinary", "Text"):
        raise RequestError(f"actions of space {kind(space)} have no text; set `parse_action` to a function")
    if kind(space) == "Box" and _size(space) > LARGEST:
        raise RequestError(f"an action of shape {space.shape} is too long for text; set `parse_action` to a function")


def how_to_act(space: Any, names: Sequence[str] = ()) -> str:
    """One sentence about answers."""
    match kind(space):
        case "Discrete" if names:
            return f"Answer with one of: {', '.join(names)}."
        case "Discrete":
            return f"Answer with one number from {space.start} to {space.start + space.n - 1}."
        case "Box":
            bounds = f" from {_bound(space.low)} to {_bound(space.high)}"
            return f"Answer with {_count(_size(space))}{bounds}."
        case "MultiDiscrete" | "MultiBinary":
            most = [1] * _size(space) if kind(space) == "MultiBinary" else [int(n) - 1 for n in space.nvec.flat]
            return f"Answer with {_count(len(most))}, each from 0 to at most {json.dumps(most)}."
    return "Answer with a text."


def parse(space: Any, text: str, names: Sequence[str] = ()) -> Any:
    """The action of an answer. Its `ValueError` is for the agent."""
    match kind(space):
        case "Discrete":
            return _choice(space, text, names)
        case "Box":
            return _vector(space, [float(number) for number in _NUMBER.findall(text)], text)
        case "MultiDiscrete" | "MultiBinary":
            return _vector(space, [int(number) for number in _WHOLE.findall(text)], text)
    return text


def written(space: Any, action: Any, names: Sequence[str] = ()) -> str:
    """An action as an answer that `parse` reads."""
    if kind(space) == "Discrete":
        return names[int(action) - int(space.start)] if names else str(int(action))
    if kind(space) == "Text":
        return str(action)
    return json.dumps([float(each) if kind(space) == "Box" else int(each) for each in action.flat])


def _choice(space: Any, text: str, names: Sequence[str]) -> int:
    for index, name in enumerate(names):
        if re.search(rf"\b{re.escape(name)}\b", text, re.IGNORECASE):
            return int(space.start) + index
    number = _WHOLE.search(text)
    if number is None:
        raise ValueError(f"There is no action in this answer. {how_to_act(space, names)}")
    action = int(number[0])
    if not space.start <= action < space.start + space.n:
        raise ValueError(f"There is no action {number[0][:20]}. {how_to_act(space, names)}")
    return action


def _vector(space: Any, numbers: Sequence[float], text: str) -> Any:
    if len(numbers) != _size(space):
        raise ValueError(f"This answer has {_count(len(numbers))}. {how_to_act(space)}")
    try:
        action = space.dtype.type(numbers[0]) if space.shape == () else _array(space, numbers)
    except OverflowError:
        raise ValueError(f"The numbers are out of range. {how_to_act(space)}") from None
    if not space.contains(action):
        raise ValueError(f"{text.strip()[:200]} is out of range. {how_to_act(space)}")
    return action


def _array(space: Any, numbers: Sequence[float]) -> Any:
    import numpy  # what Gymnasium needs anyway

    return numpy.array(numbers, dtype=space.dtype).reshape(space.shape)


def _size(space: Any) -> int:
    size = 1
    for length in space.shape:
        size *= length
    return size


def _count(numbers: int) -> str:
    return "one number" if numbers == 1 else f"{numbers} numbers"


def _bound(bounds: Any) -> str:
    values = bounds.flatten().tolist() if hasattr(bounds, "flatten") else [bounds]
    return f"{values[0]:g}" if len(set(values)) == 1 else f"[{', '.join(f'{each:g}' for each in values)}]"


def _numbers(value: Any, digits: int) -> str:
    if not isinstance(value, list):
        return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
    if value and isinstance(value[0], list):
        return "\n".join(_numbers(row, digits) for row in value)
    return f"[{', '.join(_numbers(each, digits) for each in value)}]"
