"""One HTTP request to a reward function, with limits on what comes back.

Redirects are not followed, cookies and proxies of the environment are not used, and an answer is read up to
`MAX_RESPONSE_BYTES`. Every request carries an idempotency key and a W3C trace context: all requests of one key are one
trace.
"""

import hashlib
import secrets
import time
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from rollart.backends.rewards.remote_answers import Failed, Outcome, Refused, outcome_of
from rollart.backends.rewards.remote_secret import RemoteSecret
from rollart.types.errors import RequestError
from rollart.types.reward_wire import MAX_RESPONSE_BYTES, FunctionResponse

CONNECT_S = 10.0
_CHUNK_BYTES = 2**16


class Exchanged(NamedTuple):
    """The outcome of a request, and what it took."""

    outcome: Outcome
    seconds: float
    received_bytes: int


class RemoteExchange:
    """Sends requests to one URL; use in one event loop."""

    def __init__(self, url: str, secret: RemoteSecret, connections: int) -> None:
        self._url = url
        self._secret = secret
        self._run = secrets.token_bytes(8)
        """Makes the traces of this worker differ from those of others."""
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise RequestError(f"{url!r} is not a URL: {error}") from error
        self.name = f"{parts.scheme}://{parts.netloc}{parts.path}"
        """The URL without its query, for messages."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(self, key: str, body: bytes) -> Exchanged:
        """Send a request; never raises, unless it is cancelled."""
        began = time.monotonic()
        received = 0
        try:
            async with self._session.post(
                self._url, data=body, headers=self._headers(key, body), allow_redirects=False
            ) as response:
                chunks = []
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    received += len(chunk)
                    if received > MAX_RESPONSE_BYTES:
                        response.close()
                        outcome: Outcome = Refused(f"its answer is larger than {MAX_RESPONSE_BYTES:,} bytes")
                        break
                    chunks.append(chunk)
                else:
                    retry_after = response.headers.get("Retry-After", "")
                    outcome = outcome_of(
                        response.status, retry_after, b"".join(chunks), time.time(), self._secret.removed_from
                    )
        except aiohttp.ClientConnectorCertificateError as error:
            outcome = Refused(f"its certificate is not accepted: {error.certificate_error}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            outcome = Failed(f"it cannot be reached: {str(error) or type(error).__name__}")
        return Exchanged(self._named(outcome), time.monotonic() - began, received)

    def _headers(self, key: str, body: bytes) -> dict[str, str]:
        trace = hashlib.blake2b(key.encode(), key=self._run, digest_size=16).hexdigest()
        return {
            "Content-Type": "application/json",
            "Idempotency-Key": key,
            "traceparent": f"00-{trace}-{secrets.token_hex(8)}-01",
            **self._secret.headers(body),
        }

    def _named(self, outcome: Outcome) -> Outcome:
        """Add the service's name to the reason and remove the secret from it."""
        if isinstance(outcome, FunctionResponse):
            return outcome
        reason = self._secret.removed_from(f"{self.name}: {outcome.reason}")
        return msgspec.structs.replace(outcome, reason=reason)
