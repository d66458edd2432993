"""What a service answered, as data: the status and body of a response, and the answer of every call in it.

Everything that a service sends is checked here. An answer is finite numbers, one per transcript, or a failure; the
first answer to a key counts, others with the same key are ignored.
"""

import email.utils
import json
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rollart.types.messages import Scored, ScoreFailed, ScoreRequest
from rollart.types.reward_wire import FunctionAnswer, FunctionResponse

LONGEST_RETRY_AFTER_S = 300.0
LONGEST_REASON = 500
"""Characters of an error text of a service that are kept."""
_SUM_TOLERANCE = 1e-6

_decoder = msgspec.json.Decoder(FunctionResponse)


class Busy(msgspec.Struct, frozen=True):
    """The service takes no more requests for a while."""

    reason: str
    retry_after_s: float | None


class Failed(msgspec.Struct, frozen=True):
    """The service failed or is out of reach; asking again may help."""

    reason: str


class Refused(msgspec.Struct, frozen=True):
    """Asking again would give the same."""

    reason: str


Outcome = FunctionResponse | Busy | Failed | Refused


def outcome_of(
    status: int, retry_after: str, body: bytes, now: float, cleaned: Callable[[str], str] = lambda text: text
) -> Outcome:
    """What a response means. `now` is Unix time, for a `Retry-After` that is a date.

    `cleaned` removes secrets from texts of the service, before they are cut: half of a secret would not be found.
    """
    if status == 200:
        outcome = _decoded(body)
        return _cleaned(outcome, cleaned) if isinstance(outcome, FunctionResponse) else outcome
    reason = f"it answered {status}{_detail(body, cleaned)}"
    if status in (429, 503):
        return Busy(reason, retry_after_s(retry_after, now))
    if 300 <= status < 400:
        return Refused(f"it answered {status}, a redirect, which is refused; give the final URL")
    if status in (401, 403):
        return Refused(f"{reason}: it does not accept the secret; check the variable that `secret` names")
    if status in (408, 425) or status >= 500:
        return Failed(reason)
    return Refused(reason)


def retry_after_s(header: str, now: float) -> float | None:
    """Seconds of a `Retry-After` header; None if there is none, or none that can be read.

    >>> retry_after_s("7", 0.0), retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", 50.0), retry_after_s("soon", 0.0)
    (7.0, 10.0, None)
    """
    try:
        seconds = float(header) if header else math.nan
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - now
        except ValueError:
            return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S) if math.isfinite(seconds) else None


def answer_of(request: ScoreRequest, answers: Mapping[str, FunctionAnswer]) -> Scored | ScoreFailed | None:
    """The answer to a request, out of those of a response (`by_key`); None if there is none."""
    answer = answers.get(request.key)
    if answer is None:
        return None
    if answer.error:
        return ScoreFailed(request.key, _short(answer.error), answer.retry)
    problem = _problem(answer, len(request.episodes))
    if problem:
        return ScoreFailed(request.key, problem, retry=False)
    return Scored(request.key, answer.values, answer.parts)


def by_key(answers: Sequence[FunctionAnswer]) -> dict[str, FunctionAnswer]:
    """Answers by key; the first one counts."""
    found: dict[str, FunctionAnswer] = {}
    for answer in answers:
        found.setdefault(answer.key, answer)
    return found


def _cleaned(response: FunctionResponse, cleaned: Callable[[str], str]) -> FunctionResponse:
    """The response with its texts cleaned; keys are ours."""
    answers = [
        msgspec.structs.replace(
            answer,
            error=cleaned(answer.error),
            parts=tuple([{cleaned(name): value for name, value in parts.items()} for parts in answer.parts]),
        )
        if answer.error or answer.parts
        else answer
        for answer in response.answers
    ]
    return msgspec.structs.replace(response, answers=tuple(answers))


def _problem(answer: FunctionAnswer, transcripts: int) -> str:
    """Why the answer is not one finite number per transcript; empty if it is."""
    if len(answer.values) != transcripts:
        return f"answered {len(answer.values)} numbers for {transcripts} transcripts"
    numbers = [*answer.values, *(value for parts in answer.parts for value in parts.values())]
    if not all(map(math.isfinite, numbers)):
        return f"answered {_short(str(answer.values))}; rewards and their parts must be finite numbers"
    if answer.parts and len(answer.parts) != transcripts:
        return f"answered the parts of {len(answer.parts)} rewards for {transcripts} transcripts"
    for value, parts in zip(answer.values, answer.parts, strict=False):
        if not math.isclose(math.fsum(parts.values()), value, rel_tol=_SUM_TOLERANCE, abs_tol=_SUM_TOLERANCE):
            return f"answered parts that do not add up to the reward: {_short(str(parts))} and {value}"
    return ""


def _decoded(body: bytes) -> FunctionResponse | Failed | Refused:
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        return Refused(f"its answer is not of the form of docs/rewards.md: {error}")
    except msgspec.DecodeError as error:
        # `NaN` is no JSON, but a number that many servers write; text of a proxy may be gone the next time.
        return (
            Refused(f"its answer has a number that is not finite: {error}")
            if _is_loose_json(body)
            else Failed(f"its answer is not JSON: {error}")
        )


def _is_loose_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _detail(body: bytes, cleaned: Callable[[str], str]) -> str:
    """The beginning of the text that came with an error status."""
    text = " ".join(cleaned(body.decode(errors="replace")).split())
    return f" ({_short(text)})" if text and not text.startswith("<") else ""


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} …"
