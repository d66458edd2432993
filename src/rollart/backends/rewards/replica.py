"""What runs in a replica of a reward function: requests in, answers out, both as bytes."""

import asyncio
from collections.abc import Callable

import msgspec

from rollart.backends.rewards.scorer import Scorer
from rollart.types.messages import Scored, ScoreFailed, ScoreRequest


class ReplicaAnswer(msgspec.Struct, frozen=True):
    """One of the two."""

    scored: Scored | None = None
    failed: ScoreFailed | None = None


_requests = msgspec.msgpack.Decoder(ScoreRequest)
_answers = msgspec.msgpack.Decoder(ReplicaAnswer)


def function_replica(function: str) -> Callable[[bytes], bytes]:
    """The body of a replica (`ports.replicas`)."""
    scorer, runner = Scorer(function), asyncio.Runner()

    def answer(request: bytes) -> bytes:
        given = scorer.answer(_requests.decode(request), runner)
        packed = ReplicaAnswer(given) if isinstance(given, Scored) else ReplicaAnswer(failed=given)
        return msgspec.msgpack.encode(packed)

    return answer


def encode(request: ScoreRequest) -> bytes:
    return msgspec.msgpack.encode(request)


def decode(answer: bytes) -> Scored | ScoreFailed:
    """`ValueError` if these bytes are not an answer."""
    given = _answers.decode(answer)
    found = given.scored or given.failed
    if found is None:
        raise ValueError("a replica answered nothing")
    return found
