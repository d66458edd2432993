"""Endpoint: an HTTP request to a reward function in, a response out, independent of their carrier.

Invariants: `answer` never raises; every error has the form of `gateway.functions.answers`; neither secrets nor
transcripts are logged.
"""

import logging
import math
import time
from collections.abc import Callable

import msgspec

import rollart
from rollart.app.functions.service import FunctionService
from rollart.gateway.functions.answers import HttpAnswer, Refusal, answer_too_large, failed
from rollart.gateway.functions.openapi import document
from rollart.gateway.functions.requests import MIN_DEADLINE_S, Headers, Secret, check_size, parse, route_of
from rollart.types.reward_wire import MAX_RESPONSE_BYTES

log = logging.getLogger(__name__)
TRACE = "traceparent"


class Endpoint:
    def __init__(self, service: FunctionService, secret: Secret, now: Callable[[], float] = time.time) -> None:
        self.service = service
        self._secret = secret
        self._now = now

    def refuse(self, method: str, path: str, headers: Headers) -> HttpAnswer | None:
        """The refusal of a request whose body need not be read."""
        try:
            if route_of(method, path) == "/":
                self._secret.check_headers(headers, self._now())
                check_size(headers.get("content-length", ""))
        except Refusal as refusal:
            return refusal.answer()
        return None

    async def answer(
        self, method: str, path: str, headers: Headers, body: bytes, *, limit_s: float = math.inf
    ) -> HttpAnswer:
        """Answer a whole request. `limit_s`: seconds after which the platform ends this process."""
        try:
            route = route_of(method, path)
            if route == "/health":
                return self._health()
            if route == "/openapi.json":
                executor = self.service.executor
                text = document(executor.path, executor.kind, rollart.__version__, secret=not self._secret.open)
                return HttpAnswer(200, text)
            self._secret.check(headers, body, self._now())
            return await self._score(body, limit_s)
        except Refusal as refusal:
            return refusal.answer()
        except Exception:
            # A bug of ours, or of the executor: its client may try another instance.
            log.exception("request failed (%s %s)", TRACE, headers.get(TRACE, "none")[:100])
            return failed().answer()

    async def _score(self, body: bytes, limit_s: float) -> HttpAnswer:
        request = parse(body, self.service.executor.kind)
        deadline_s = min(max(request.deadline_s, MIN_DEADLINE_S), limit_s)
        request = msgspec.structs.replace(request, deadline_s=deadline_s)
        response = await self.service.answer(request)
        encoded = msgspec.json.encode(response)
        if len(encoded) > MAX_RESPONSE_BYTES:
            raise answer_too_large(MAX_RESPONSE_BYTES)
        return HttpAnswer(200, encoded)

    def _health(self) -> HttpAnswer:
        if self.service.is_stuck:
            status = "every slot is held by a call that is past its deadline; start this instance again"
            return HttpAnswer(503, msgspec.json.encode({"status": status}))
        return HttpAnswer(200, msgspec.json.encode({"status": "ok", **self.service.executor.report()}))
