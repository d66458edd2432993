"""A reward function behind a URL of this machine: a real HTTP server with the wire format, and faults on request.

It repeats the answers of keys that it remembers, as the format demands. `misbehave` sees every request first, with its
number from 0 on, and may answer in its place.
"""

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Self

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollart.backends.rewards.scorer import BadReward, Scorer
from rollart.types.reward_wire import FunctionAnswer, FunctionCall, FunctionRequest, FunctionResponse

PATIENCE_S = 100.0


class Seen(NamedTuple):
    """A request that came."""

    headers: dict[str, str]
    body: bytes
    request: FunctionRequest


Misbehave = Callable[[int, Seen], Awaitable[Response | None]]


async def behave(number: int, seen: Seen) -> Response | None:  # noqa: ARG001
    return None


class RewardServer:
    """Serves one function in a thread of this process."""

    def __init__(self, function: str, misbehave: Misbehave = behave, port: int = 0) -> None:
        self._scorer = Scorer(function)
        self.misbehave = misbehave
        self.seen: list[Seen] = []
        self.answers: dict[str, FunctionAnswer] = {}
        self.computed = 0
        self._lock = threading.Lock()
        app = Starlette(routes=[Route("/score", self._score, methods=["POST"])])
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        # Listens at once: requests before the start wait. asyncio sends small answers without delay only where the
        # protocol of the socket is named.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self._socket.listen(256)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/score"
        self._thread = threading.Thread(target=self.serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(PATIENCE_S)
        self._socket.close()

    def serve(self) -> None:
        self._server.run([self._socket])

    async def _score(self, request: Request) -> Response:
        self.loop = asyncio.get_running_loop()
        body = await request.body()
        seen = Seen(dict(request.headers), body, msgspec.json.decode(body, type=FunctionRequest))
        number = len(self.seen)
        self.seen.append(seen)
        instead = await self.misbehave(number, seen)
        return instead if instead is not None else await self.answer(seen, cold=number == 0)

    async def answer(self, seen: Seen, *, cold: bool = False, times: int = 1) -> Response:
        """The right answer; each of its parts `times` over."""
        return await asyncio.to_thread(self._response, seen, cold, times)

    def _response(self, seen: Seen, cold: bool, times: int) -> Response:
        answers = tuple(answer for call in seen.request.calls for answer in [self._answer(call)] * times)
        return json(FunctionResponse(answers, instance=f"p{os.getpid()}", cold=cold))

    def _answer(self, call: FunctionCall) -> FunctionAnswer:
        with self._lock:
            if call.key not in self.answers:
                self.computed += 1
                self.answers[call.key] = self._computed(call)
            return self.answers[call.key]

    def _computed(self, call: FunctionCall) -> FunctionAnswer:
        try:
            rewards = self._scorer.score(call.transcripts)
        except BadReward as error:
            return FunctionAnswer(call.key, error=str(error))
        except Exception as error:  # noqa: BLE001 - the boundary of user code
            return FunctionAnswer(call.key, error=f"{type(error).__name__}: {error}", retry=True)
        return FunctionAnswer(call.key, rewards.values, rewards.parts, compute_s=1e-6)


def json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def status(code: int, text: str = "", **headers: str) -> Response:
    return Response(text, code, {name.replace("_", "-"): value for name, value in headers.items()})


async def hang() -> Response:
    """Never returns while a test may wait."""
    await asyncio.sleep(10 * PATIENCE_S)
    raise AssertionError("a hanging request was waited for")


def main(function: str, port: str) -> None:
    """Serve until killed; prints a line when it listens."""
    server = RewardServer(function, port=int(port))
    print(server.url, flush=True)  # noqa: T201
    server.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
