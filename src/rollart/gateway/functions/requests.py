"""Requests to a served reward function: the secret, the route, the body, checked without any I/O.

Invariants: a request with the wrong secret is rejected before its body is parsed; a `FunctionRequest` that `parse`
returns fits the function, so whatever fails afterwards is the function's failure.
"""

import hashlib
import hmac
from collections.abc import Mapping

import msgspec

from rollart.gateway.functions.answers import (
    METHODS,
    malformed,
    not_configured,
    too_large,
    wrong_method,
    wrong_secret,
)
from rollart.ports.reward import RewardKind
from rollart.types.reward_signature import HEADER, is_fresh, is_signed
from rollart.types.reward_wire import MAX_REQUEST_BYTES, FunctionRequest

MIN_DEADLINE_S = 1.0
"""Shorter deadlines are raised to this one instead of being rejected."""
MAX_DEADLINE_S = 86400.0
SIGNATURE = HEADER.lower()
MAX_CALLS = 1024
MAX_KEY_CHARACTERS = 512
Headers = Mapping[str, str]
"""By name in lower case."""


class Secret(msgspec.Struct, frozen=True):
    """Secret that clients must know. Without a secret and without `open`, every request is refused."""

    value: str = ""
    variable: str = ""
    """Environment variable that has it, for messages."""
    open: bool = False
    """The platform authenticates clients, so that no secret is needed."""

    def check_headers(self, headers: Headers, now_s: float) -> None:
        """Refuse what can be refused before the body is read."""
        if self.open:
            return
        if not self.value:
            raise not_configured(self.variable)
        if not is_fresh(headers.get(SIGNATURE, ""), now_s) and not self._is_bearer(headers):
            raise wrong_secret()

    def check(self, headers: Headers, body: bytes, now_s: float) -> None:
        self.check_headers(headers, now_s)
        known = self.open or self._is_bearer(headers) or is_signed(headers[SIGNATURE], self.value, now_s, body)
        if not known:
            raise wrong_secret()

    def _is_bearer(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Digests, so that the comparison does not even reveal the length.
        return hmac.compare_digest(_sha256(given.strip()), _sha256(self.value)) and scheme.lower() == "bearer"


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def route_of(method: str, path: str) -> str:
    """Route of a request, a key of `METHODS`; `HEAD` is answered like `GET`.

    >>> route_of("POST", "/my-function/"), route_of("GET", "/my-function/health")
    ('/', '/health')
    """
    route = next((known for known in ("/health", "/openapi.json") if path.endswith(known)), "/")
    allowed = METHODS[route]
    if method != allowed and (method, allowed) != ("HEAD", "GET"):
        raise wrong_method(allowed)
    return route


def check_size(announced: str, limit: int = MAX_REQUEST_BYTES) -> None:
    """Refuse a body by its `Content-Length`, if it has one, before it is read."""
    if not announced:
        return
    if not (announced.isascii() and announced.isdecimal()):
        raise malformed(f"Content-Length {announced[:20]!r} is not a number.")
    if len(announced) > 18 or int(announced) > limit:
        raise too_large(limit)


def parse(body: bytes, kind: RewardKind) -> FunctionRequest:
    """The request in a body, for a function that sees one transcript or a group."""
    if len(body) > MAX_REQUEST_BYTES:
        raise too_large(MAX_REQUEST_BYTES)
    try:
        request = msgspec.json.decode(body, type=FunctionRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(f"The body is not a request: {error}.") from error
    if not 0 < len(request.calls) <= MAX_CALLS:
        raise malformed(f"`calls` must have 1 to {MAX_CALLS} items.")
    if not 0 < request.deadline_s <= MAX_DEADLINE_S:
        raise malformed(f"`deadline_s` must be more than 0 and at most {MAX_DEADLINE_S:g}.")
    for number, call in enumerate(request.calls):
        place = f"calls[{number}]"
        if not 0 < len(call.key) <= MAX_KEY_CHARACTERS:
            raise malformed(f"`{place}.key` must have 1 to {MAX_KEY_CHARACTERS} characters.")
        if not call.transcripts:
            raise malformed(f"`{place}.transcripts` is empty.")
        if kind is RewardKind.TRAJECTORY and len(call.transcripts) != 1:
            raise malformed(
                f"`{place}.transcripts` has {len(call.transcripts)} items. This function sees one transcript at a "
                "time: make a call of each."
            )
    return request
