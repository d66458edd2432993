"""Train and held-out sets, disjoint by content rather than by seed: different seeds often draw the same map.

Invariant: a hash of the content alone decides its side, in every process and version, so no setting, seed or order can
put a held-out problem into training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollart.config.held_out import HELD_OUT_SHARE
from rollart.types.errors import RequestError

if TYPE_CHECKING:  # where environments have an interpreter of their own, there is no msgspec
    from rollart.types.trajectory import Prompt

HELD_OUT = "held_out"
"""Key of `Prompt.data`: True asks for held-out content, False for training content, absent for any."""
MOST_DRAWS = 1000


def is_held_out(content: str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether content belongs to the held-out share.

    >>> [is_held_out(problem) for problem in ("1+1", "1+2", "1+3", "1+4")]
    [False, False, True, False]
    """
    return _number(content) < share * 2**64


def draw(prompt: Prompt, make: Callable[[int], str]) -> str:
    """Content for a prompt that is a seed: `make(seed)`, retried with derived seeds until on the prompt's side."""
    side = prompt.data.get(HELD_OUT)
    for attempt in range(MOST_DRAWS):
        content = make(prompt.seed if not attempt else _number(f"{prompt.seed}/{attempt}"))
        if side is None or is_held_out(content) == side:
            return content
    raise RequestError(
        f"prompt {prompt.id} of {prompt.task!r}: {MOST_DRAWS} draws gave no content "
        f"{'held out' if side else 'to train on'}. The task has too few distinct episodes; make them larger."
    )


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
