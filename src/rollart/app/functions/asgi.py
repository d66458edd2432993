"""The endpoint as an ASGI application, for any ASGI server. It needs no framework, so packages stay small."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from rollart.app.functions.endpoint import Endpoint
from rollart.gateway.functions.answers import HttpAnswer, too_large, too_slow
from rollart.types.reward_wire import MAX_REQUEST_BYTES

BODY_TIMEOUT_S = 30.0
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class AsgiApplication:
    """Refuses strangers and large bodies before it reads them; gives up on bodies that do not arrive."""

    def __init__(self, build: Callable[[], Endpoint], *, body_timeout_s: float = BODY_TIMEOUT_S) -> None:
        """`build` is called on the server's event loop, at the first request or at its start-up."""
        self._build = build
        self._built: Endpoint | None = None
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            answer = await self._answer(scope, receive)
            if answer is not None:
                await _send(send, answer)

    @property
    def _endpoint(self) -> Endpoint:
        if self._built is None:
            self._built = self._build()
        return self._built

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self._endpoint.service.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self._endpoint.service.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _answer(self, scope: Mapping[str, Any], receive: Receive) -> HttpAnswer | None:
        """None if the client left."""
        method, path = scope["method"], scope["path"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._endpoint.refuse(method, path, headers)
        if refusal is not None:
            return refusal
        try:
            async with asyncio.timeout(self._body_timeout_s):
                body = await _read(receive)
        except TimeoutError:
            return too_slow(self._body_timeout_s).answer()
        if body is None:
            return None
        if len(body) > MAX_REQUEST_BYTES:
            return too_large(MAX_REQUEST_BYTES).answer()
        return await self._endpoint.answer(method, path, headers, body)


async def _read(receive: Receive) -> bytes | None:
    """The body, as far as it is not too large; None if the client left."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_REQUEST_BYTES or not message.get("more_body", False):
            return bytes(body)


async def _send(send: Send, answer: HttpAnswer) -> None:
    fields = answer.headers | {"content-length": str(len(answer.body))}
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
