"""The endpoint as an ASGI application, for any ASGI server. It needs no framework, so packages stay small."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any

from rollart.app.functions.endpoint import Endpoint
from rollart.app.functions.service import RETRY_AFTER_S
from rollart.gateway.functions.answers import HttpAnswer, Refusal, busy, too_large, too_slow
from rollart.types.reward_wire import MAX_REQUEST_BYTES

BODY_TIMEOUT_S = 30.0
MAX_HELD_BYTES = 8 * MAX_REQUEST_BYTES
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class AsgiApplication:
    """Rejects unauthenticated and oversized requests before it reads their bodies; times out on bodies that do not
    arrive. A client that leaves is noticed."""

    def __init__(self, build: Callable[[], Endpoint], *, body_timeout_s: float = BODY_TIMEOUT_S) -> None:
        """`build` is called on the server's event loop, at the first request or at its start-up."""
        self._build = build
        self._built: Endpoint | None = None
        self._body_timeout_s = body_timeout_s
        self._held_bytes = 0
        """Size of all bodies that are being read or answered."""

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
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_timeout_s):
                if not await self._read(receive, body):
                    return None
            answering = self._endpoint.answer(method, path, headers, bytes(body))
            return await _while_connected(receive, answering)
        except TimeoutError:
            return too_slow(self._body_timeout_s).answer()
        except Refusal as refused:
            return refused.answer()
        finally:
            self._held_bytes -= len(body)

    async def _read(self, receive: Receive, body: bytearray) -> bool:
        """Read the body; False if the client left, `Refusal` if it, or all bodies together, are too large."""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            piece = message.get("body", b"")
            body += piece
            self._held_bytes += len(piece)
            if len(body) > MAX_REQUEST_BYTES:
                raise too_large(MAX_REQUEST_BYTES)
            if self._held_bytes > MAX_HELD_BYTES:
                raise busy(RETRY_AFTER_S)
            if not message.get("more_body", False):
                return True


async def _while_connected(receive: Receive, answering: Coroutine[Any, Any, HttpAnswer]) -> HttpAnswer | None:
    """The answer; None if the client left before, and then nothing works on it any more."""
    tasks = [asyncio.create_task(answering), asyncio.create_task(_left(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, answer: HttpAnswer) -> None:
    fields = answer.headers | {"content-length": str(len(answer.body))}
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
