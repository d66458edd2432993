"""Call of a reward function, its result checked.

Invariant: a result is one finite number per transcript, as floats, or `BadReward`. Shared by reward workers, by servers
of reward functions and by `rollart reward try`, so all of them judge a result in the same way.
"""

import asyncio
import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollart.ports.factory import load
from rollart.ports.reward import RewardKind, kind_of
from rollart.types.transcript import Transcript

MAX_ERROR_CHARACTERS = 2000


class BadReward(Exception):
    """The function returned something that is not a reward; it would again."""


class Rewards(NamedTuple):
    """A value per transcript, and its named parts if the function gives them."""

    values: tuple[float, ...]
    parts: tuple[dict[str, float], ...] = ()


class RewardCaller:
    """One reward function, by its factory path; thread-safe as far as the function is."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._function = load(path)
        self.kind = kind_of(self._function, path)

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function, so that many of its calls can wait in one thread."""
        return any(map(inspect.iscoroutinefunction, (self._function, type(self._function).__call__)))

    def score(self, transcripts: Sequence[Transcript], runner: asyncio.Runner | None = None) -> Rewards:
        """Call the function. `runner` runs what it awaits, a fresh one by default."""
        result = self._call(transcripts)
        if inspect.isawaitable(result):
            if runner is None:
                with asyncio.Runner() as fresh:
                    result = fresh.run(_awaited(result))
            else:
                result = runner.run(_awaited(result))
        return self._checked(result, len(transcripts))

    async def score_on_loop(self, transcripts: Sequence[Transcript]) -> Rewards:
        """Call a function that is async on the running loop."""
        return self._checked(await self._call(transcripts), len(transcripts))

    def _call(self, transcripts: Sequence[Transcript]) -> Any:
        return self._function(list(transcripts) if self.kind is RewardKind.GROUP else transcripts[0])

    def _checked(self, result: Any, members: int) -> Rewards:
        if self.kind is RewardKind.GROUP:
            return self._of_group(result, members)
        if isinstance(result, Mapping):
            return self._of_parts(result)
        return Rewards((self._number(result),))

    def _of_group(self, result: Any, members: int) -> Rewards:
        if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__len__"):
            raise BadReward(f"the reward function {self.path} returned {result!r}; it must be a list of numbers")
        if len(result) != members:
            raise BadReward(f"the reward function {self.path} returned {len(result)} numbers for {members} transcripts")
        return Rewards(tuple([self._number(value) for value in result]))

    def _of_parts(self, result: Mapping[Any, Any]) -> Rewards:
        if not result:
            raise BadReward(f"the reward function {self.path} returned no part; a dict names at least one")
        for name in result:
            if not isinstance(name, str) or not _is_unicode(name):
                raise BadReward(
                    f"the reward function {self.path} returned a part named {name!r}; names are Unicode text"
                )
        parts = {name: self._number(value) for name, value in result.items()}
        return Rewards((self._number(math.fsum(parts.values())),), (parts,))

    def _number(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not is_finite(value):
            raise BadReward(f"the reward function {self.path} returned {value!r}; it must be a finite number")
        return float(value)


def shown(error: BaseException) -> str:
    """The text of an error of user code, bounded, and such that every encoding can hold it.

    >>> shown(ValueError("half of a pair: \\ud83d"))
    'half of a pair: \\\\ud83d'
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - user code as well
        text = "(its text cannot be made)"
    return text[:MAX_ERROR_CHARACTERS].encode(errors="backslashreplace").decode()


def is_finite(number: Any) -> bool:
    """Whether a number is finite as a float. Integers may be too large for one."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which no encoding can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _awaited(result: Any) -> Any:
    return await result
