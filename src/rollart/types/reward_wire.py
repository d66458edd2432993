"""Wire format of reward functions behind a URL: JSON over HTTP, one POST for one or several calls.

    POST <url>                                        200
    Content-Type: application/json                    {"answers": [{"key": "17/correct", "values": [1.0]}],
    Idempotency-Key: <key of the first call>           "instance": "f3a9", "cold": false}
    Authorization: Bearer <secret>   (optional)
    traceparent: 00-…                (optional)
    {"calls": [{"key": "17/correct", "transcripts": [{…}]}], "deadline_s": 12.5}

A call has one transcript, or all members of a group. Its answer has one value per transcript, or an `error`; `retry`
says whether asking again may help. Answers come in the order of the calls. Other status codes concern the whole
request: 401 or 403 wrong secret, 413 too large, 422 not of this form, 429 and 503 busy (`Retry-After` in seconds), 504
deadline passed. A server that gets a key again while it remembers it repeats its answer and does not call the function.
"""

import msgspec

from rollart.types.transcript import Transcript

MAX_REQUEST_BYTES = 64 * 2**20
"""Servers refuse larger requests (413), clients do not send them."""
MAX_RESPONSE_BYTES = 4 * 2**20
"""Clients refuse larger responses."""


class FunctionCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of a reward function."""

    key: str
    """Idempotency key: the same for every attempt at the same reward."""
    transcripts: tuple[Transcript, ...]
    """One, or all members of a group."""


class FunctionRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a request."""

    calls: tuple[FunctionCall, ...]
    deadline_s: float
    """Seconds after which the caller no longer waits for the answers."""


class FunctionAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one call: values, or an error."""

    key: str
    values: tuple[float, ...] = ()
    """One per transcript."""
    parts: tuple[dict[str, float], ...] = ()
    """Named parts of each value, if the function gives them."""
    error: str = ""
    retry: bool = False
    """Whether another attempt at a call that failed may succeed."""
    compute_s: float = 0.0
    """Seconds that the function ran."""


class FunctionResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a response with status 200."""

    answers: tuple[FunctionAnswer, ...]
    instance: str = ""
    """Name of the process that answered, unique per process: shows how many there are."""
    cold: bool = False
    """Whether this was the first request of that process."""
