"""Memory of a served reward function: which calls it has answered, so that a repeated one is not computed again.

Invariants: an answer is remembered if the call would end the same way again, so not a failure that a retry may cure;
entries leave oldest first; their number and their size are bounded.

Calls are de-duplicated by key and transcripts: keys are unique in a run, and one server may serve several.
"""

import hashlib
from collections import OrderedDict

import msgspec

from rollart.types.reward_wire import FunctionAnswer, FunctionCall

MAX_ANSWERS = 16384
MAX_BYTES = 32 * 2**20

_encoder = msgspec.json.Encoder()  # not msgpack, whose integers have 64 bits


def identity(call: FunctionCall) -> bytes:
    """De-duplication key of a call."""
    return hashlib.blake2b(_encoder.encode(call), digest_size=16).digest()


class Memory:
    """Answers by the identity of their calls.

    >>> memory, call = Memory(), FunctionCall("17/correct", ())
    >>> memory.remember(identity(call), FunctionAnswer("17/correct", (1.0,)))
    >>> memory.recall(identity(call)).values
    (1.0,)
    """

    def __init__(self, max_answers: int = MAX_ANSWERS, max_bytes: int = MAX_BYTES) -> None:
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._answers: OrderedDict[bytes, tuple[FunctionAnswer, int]] = OrderedDict()
        self._bytes = 0

    def recall(self, call: bytes) -> FunctionAnswer | None:
        found = self._answers.get(call)
        return found[0] if found else None

    def remember(self, call: bytes, answer: FunctionAnswer) -> None:
        if answer.retry or call in self._answers:
            return
        size = len(_encoder.encode(answer)) + len(call)
        self._answers[call] = (answer, size)
        self._bytes += size
        while len(self._answers) > self._max_answers or self._bytes > self._max_bytes:
            self._bytes -= self._answers.popitem(last=False)[1][1]
