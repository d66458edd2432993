"""What runs in a packaged function, on every target: only the standard library, msgspec and the function's own needs.

`main.py` of a package is one call of this module. Settings come from the environment of the deployment.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollart.app.functions.asgi import AsgiApplication
from rollart.app.functions.endpoint import Endpoint
from rollart.app.functions.executor import LocalExecutor
from rollart.app.functions.service import FunctionService
from rollart.gateway.functions.answers import HttpAnswer, Refusal
from rollart.gateway.functions.lambda_events import (
    LambdaRequest,
    http_request,
    http_response,
    invoke_body,
    invoke_result,
    is_http,
)
from rollart.gateway.functions.requests import Secret
from rollart.ports.factory import moved
from rollart.types.errors import RequestError

SECRET = "ROLLART_REWARD_SECRET"
OPEN = "ROLLART_REWARD_OPEN"
"""Set to 1 where the platform authenticates clients, so that no secret is needed."""
CONCURRENCY = "ROLLART_REWARD_CONCURRENCY"
DEFAULT_CONCURRENCY = 8
LAMBDA_RESERVE_S = 0.5
"""Time to answer before Lambda ends the process."""


def asgi(entry: str, function: str) -> AsgiApplication:
    """The ASGI application of a package; `entry` is the `__file__` of its entry point."""
    executor = _load(entry, function)
    return AsgiApplication(lambda: _endpoint(executor))


def functions_framework(entry: str, function: str) -> Callable[[Any], tuple[bytes, int, dict[str, str]]]:
    """The HTTP function of a package; it gets Flask's request."""
    background = Background(_load(entry, function))

    def score(request: Any) -> tuple[bytes, int, dict[str, str]]:
        headers = {name.lower(): value for name, value in request.headers.items()}
        refusal = background.endpoint.refuse(request.method, request.path, headers)
        answer = refusal or background.answer(request.method, request.path, headers, request.get_data())
        return answer.body, answer.status, answer.headers

    return score


def aws_lambda(entry: str, function: str) -> Callable[[Any, Any], dict[str, Any]]:
    """The handler of a package, for function URLs and direct invocations."""
    background = Background(_load(entry, function))
    trusted = Background(background.executor, trusted=True)

    def handler(event: Any, context: Any) -> dict[str, Any]:
        limit_s = context.get_remaining_time_in_millis() / 1000 - LAMBDA_RESERVE_S
        if not is_http(event):
            request = LambdaRequest("POST", "/", {}, invoke_body(event))
            return invoke_result(trusted.answer(*request, limit_s=limit_s))
        try:
            request = http_request(event)
        except Refusal as refusal:
            return http_response(refusal.answer())
        return http_response(background.answer(*request, limit_s=limit_s))

    return handler


class Background:
    """The endpoint on an event loop in a thread, for targets that call a plain function.

    Loop and thread start with the first request: servers fork after they have loaded the function.
    """

    def __init__(self, executor: LocalExecutor, *, trusted: bool = False) -> None:
        self.executor = executor
        self.endpoint = _endpoint(executor, trusted=trusted)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes, **options: float) -> HttpAnswer:
        answering = self.endpoint.answer(method, path, headers, body, **options)
        return asyncio.run_coroutine_threadsafe(answering, self._running()).result()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="reward endpoint", daemon=True).start()
            return self._loop


def _load(entry: str, function: str) -> LocalExecutor:
    moved(Path(), Path(entry).parent)  # a file of the package is named relative to it
    return LocalExecutor(function, _concurrency(os.environ.get(CONCURRENCY, "")))


def _concurrency(given: str) -> int:
    if not given:
        return DEFAULT_CONCURRENCY
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and int(given)):
        raise RequestError(f"{CONCURRENCY} is {given!r}; it must be a number from 1 on")
    return int(given)


def _endpoint(executor: LocalExecutor, *, trusted: bool = False) -> Endpoint:
    is_open = trusted or os.environ.get(OPEN) == "1"
    return Endpoint(FunctionService(executor), Secret(os.environ.get(SECRET, "").strip(), SECRET, open=is_open))
