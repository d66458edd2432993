"""Client of a chat endpoint, for judges: one question, one answer, despite an endpoint that is busy or fails.

Retries what may pass (429, 5xx, no connection, no answer in time) with jitter, and honours `Retry-After`. Redirects are
not followed, answers are bounded, and the key is sent in one header only. Thread-safe: each thread has a
connection of its own, which is kept open.
"""

import http.client
import json
import os
import random
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rollart.ports.reward_call import BadReward
from rollart.types.errors import RequestError

MAX_ANSWER_BYTES = 4 * 2**20
LONGEST_PAUSE_S = 30.0
FIRST_PAUSE_S = 0.5
SHOWN_CHARACTERS = 300


class JudgeUnavailable(Exception):
    """The endpoint did not answer, in spite of retries. A later attempt may succeed."""


class _Busy(Exception):
    """Another attempt may help, after `pause_s` if the endpoint asked for that."""

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class _Response(NamedTuple):
    status: int
    retry_after: str
    body: bytes


class ChatClient:
    def __init__(self, base_url: str, secret: str, timeout_s: float, attempts: int) -> None:
        """`secret`: environment variable with the key, or empty."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
            raise RequestError(f"judge: base_url: {parts.geturl()!r} is not the URL of an API; write https://host/v1")
        if secret and not os.environ.get(secret):
            raise RequestError(f"judge: secret: the environment variable {secret} is not set where the judge runs")
        self._parts = parts
        self._path = f"{parts.path.rstrip('/')}/chat/completions"
        self._name = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._secret = os.environ[secret] if secret else ""
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._kept = threading.local()

    def ask(self, request: Mapping[str, Any]) -> str:
        """The text of the answer. `BadReward` if asking again would not help, else `JudgeUnavailable`."""
        body = json.dumps(request).encode()
        for attempt in range(1, self._attempts + 1):
            try:
                return self._once(body)
            except _Busy as busy:
                if attempt == self._attempts:
                    raise JudgeUnavailable(f"{self._name}: {busy} (attempt {attempt})") from None
                time.sleep(_pause_s(attempt, busy.pause_s))
        raise AssertionError("there is at least one attempt")

    def _once(self, body: bytes) -> str:
        try:
            response = self._exchange(body)
        except ssl.SSLCertVerificationError as error:
            raise BadReward(f"{self._name}: its certificate is not accepted: {error.verify_message}") from error
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            raise _Busy(f"it cannot be reached: {str(error) or type(error).__name__}") from error
        if response.status == 200:
            return self._text(response.body)
        said = f"it answered {response.status}: {self._shown(response.body)}"
        if response.status in (408, 409, 425, 429) or response.status >= 500:
            raise _Busy(said, _seconds(response.retry_after))
        raise BadReward(f"{self._name}: {said}")

    def _exchange(self, body: bytes) -> _Response:
        connection: http.client.HTTPConnection | None = getattr(self._kept, "connection", None)
        if connection is None:
            kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout_s)
            self._kept.connection = connection
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        connection.request("POST", self._path, body, headers)
        response = connection.getresponse()
        received = self._read(response)
        return _Response(response.status, response.headers.get("Retry-After", ""), received)

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        """The body, within the time and size limits."""
        deadline = time.monotonic() + self._timeout_s
        received = bytearray()
        while chunk := response.read1(2**16):
            received += chunk
            if len(received) > MAX_ANSWER_BYTES:
                self._drop()
                raise BadReward(f"{self._name}: its answer is larger than {MAX_ANSWER_BYTES} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(f"its answer took longer than {self._timeout_s:g} s")
        if response.length:
            raise http.client.IncompleteRead(bytes(received), response.length)
        response.close()  # leaves the connection open
        return bytes(received)

    def _drop(self) -> None:
        connection = getattr(self._kept, "connection", None)
        if connection is not None:
            connection.close()
            self._kept.connection = None

    def _text(self, body: bytes) -> str:
        try:
            text = json.loads(body)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            raise BadReward(f"{self._name}: its answer is not a chat completion: {self._shown(body)!r}") from error
        return text if isinstance(text, str) else ""  # a model may answer with nothing

    def _shown(self, body: bytes) -> str:
        """The beginning of a body, without the key: cut last, or a part of the key could be left."""
        text = body.decode(errors="replace")
        return (text.replace(self._secret, "[secret]") if self._secret else text)[:SHOWN_CHARACTERS]


def _pause_s(attempt: int, asked_s: float | None) -> float:
    """Seconds before the next attempt, with jitter so that judges do not come back all at once."""
    pause_s = FIRST_PAUSE_S * 2 ** (attempt - 1) if asked_s is None else asked_s
    return min(pause_s, LONGEST_PAUSE_S) * random.uniform(1.0, 1.25)


def _seconds(retry_after: str) -> float | None:
    return float(retry_after) if retry_after.isascii() and retry_after.isdigit() else None
