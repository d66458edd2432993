"""Responses of a served reward function, and the errors that concern a whole request.

Every error has one form, `{"error": {"code": …, "message": …}}`. Clients decide by the status (`types/reward_wire.py`);
the code is for people who search, the message says what to do.
"""

from collections.abc import Mapping

import msgspec

JSON = "application/json"
METHODS = {"/": "POST", "/health": "GET", "/openapi.json": "GET"}
"""Routes, and the one method of each. Any other path is that of the function, because platforms add prefixes."""


class HttpAnswer(msgspec.Struct, frozen=True):
    """A response, independent of its carrier: an ASGI server, functions-framework, Lambda."""

    status: int
    body: bytes
    headers: dict[str, str] = msgspec.field(default_factory=lambda: {"content-type": JSON})
    """By name in lower case."""


class Refusal(Exception):
    """Ends a request with an HTTP status. The message goes to the client: it names no path and no secret."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = dict(headers or {})

    def answer(self) -> HttpAnswer:
        error = {"code": self.code, "message": self.message}
        return HttpAnswer(self.status, msgspec.json.encode({"error": error}), {"content-type": JSON, **self.headers})


def wrong_secret() -> Refusal:
    message = "Send the secret of this function as 'Authorization: Bearer SECRET', or sign the request with it."
    return Refusal(401, "wrong_secret", message, {"www-authenticate": "Bearer"})


def not_configured(variable: str) -> Refusal:
    """The deployment lacks its secret: every request is refused."""
    return Refusal(403, "no_secret", f"This function has no secret: set {variable} where it is deployed.")


def wrong_method(allowed: str) -> Refusal:
    return Refusal(405, "wrong_method", f"Only {allowed} is possible here.", {"allow": allowed})


def too_large(limit: int) -> Refusal:
    message = f"The body is larger than {limit} bytes. Send fewer calls at a time."
    return Refusal(413, "too_large", message, {"connection": "close"})


def answer_too_large(limit: int) -> Refusal:
    message = f"The answer would be larger than {limit} bytes. Send fewer calls at a time."
    return Refusal(413, "answer_too_large", message)


def too_slow(timeout_s: float) -> Refusal:
    return Refusal(408, "too_slow", f"The body did not arrive within {timeout_s:g} s.", {"connection": "close"})


def malformed(message: str) -> Refusal:
    return Refusal(422, "malformed", message)


def busy(retry_after_s: int) -> Refusal:
    message = f"The function runs as many calls as it may. Try again in {retry_after_s} s."
    return Refusal(429, "busy", message, {"retry-after": str(retry_after_s)})


def deadline_passed(deadline_s: float) -> Refusal:
    return Refusal(504, "deadline_passed", f"The function did not finish within {deadline_s:g} s.")


def failed() -> Refusal:
    return Refusal(500, "failed", "The server failed on this request; its log says why.")
