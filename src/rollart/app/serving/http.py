"""The endpoint as an ASGI application: routes, the key, limits on bodies, errors.

Invariants: every path but `/health` needs the key, also those that do not exist, before a byte of the body is read;
every error has OpenAI's shape; what a client sends is bounded in bytes and time before it is parsed.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rollart.app.serving.answering import GenerationResponse, refusal
from rollart.app.serving.engine import Full, NotServed, ServingEngine
from rollart.app.serving.model import ServedModel
from rollart.backends.environments.chat_template import NotRendered
from rollart.backends.environments.conversation import Conversations
from rollart.gateway.openai.answers import ChatAnswer, TextAnswer, model, models
from rollart.gateway.openai.errors import ApiError, busy, invalid, too_long, unauthorised, unknown_model
from rollart.gateway.openai.requests import Options, Prompt, parse_chat, parse_completion
from rollart.types.messages import Sampling
from rollart.types.tokens import Segment

HEALTH = "/health"
MAX_BODY_BYTES = 4 * 2**20
BODY_TIMEOUT_S = 30.0
RETRY_AFTER_S = 1


class KeyRequired:
    """Middleware that answers with 401 unless the request has the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == HEALTH or self._holds(scope):
            await self._app(scope, receive, send)
        else:
            await _as_response(unauthorised())(scope, receive, send)

    def _holds(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # Digests, so that the comparison does not even reveal the length.
        return hmac.compare_digest(_digest(key.strip()), self._key) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def application(
    served: ServedModel, engine: ServingEngine, key: str, *, body_timeout_s: float = BODY_TIMEOUT_S
) -> Starlette:
    """The application; `engine` has started."""
    endpoint = Endpoint(served, engine, body_timeout_s)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
            Route("/v1/completions", endpoint.complete, methods=["POST"]),
            Route("/v1/models", endpoint.models),
            Route("/v1/models/{name:path}", endpoint.model),
            Route(HEALTH, endpoint.health),
        ],
        middleware=[Middleware(KeyRequired, key=key)],
        exception_handlers={ApiError: _answer_error, HTTPException: _answer_error, Exception: _answer_error},
    )
    app.router.redirect_slashes = False
    return app


class Endpoint:
    """The routes."""

    def __init__(self, served: ServedModel, engine: ServingEngine, body_timeout_s: float) -> None:
        self._name = served.name
        self._conversations: Conversations = served.conversations
        self._vocabulary = served.shape.vocabulary
        self._engine = engine
        self._body_timeout_s = body_timeout_s
        self._created_s = int(time.time())

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        trouble = self._engine.trouble()
        return JSONResponse({"status": trouble or "ok"}, 503 if trouble else 200)

    async def models(self, request: Request) -> Response:  # noqa: ARG002
        return Response(models(self._name, self._created_s), media_type="application/json")

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return Response(model(self._name, self._created_s), media_type="application/json")

    async def chat(self, request: Request) -> Response:
        asked = parse_chat(await self._body(request))
        self._check_model(asked.options.model)
        if self._conversations.no_chat:
            raise invalid(self._conversations.no_chat)
        try:
            # In a thread: a long text takes a while.
            prompt = await asyncio.to_thread(self._conversations.render, asked.messages)
        except NotRendered as error:
            raise invalid(f"The conversation cannot be rendered: {error}.", param="messages") from error
        return self._generate(ChatAnswer(**self._head("chatcmpl", asked.options)), asked.options, [prompt])

    async def complete(self, request: Request) -> Response:
        asked = parse_completion(await self._body(request))
        self._check_model(asked.options.model)
        prompts = [await asyncio.to_thread(self._encoded, prompt) for prompt in asked.prompts]
        return self._generate(TextAnswer(**self._head("cmpl", asked.options)), asked.options, prompts)

    async def _body(self, request: Request) -> bytes:
        if self._engine.is_full:
            raise busy(RETRY_AFTER_S)
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return await _read(request)
        except TimeoutError as error:
            message = f"The body did not arrive within {self._body_timeout_s:g} s."
            raise ApiError(408, message, headers={"Connection": "close"}) from error

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise unknown_model(name, self._name)

    def _encoded(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            if max(prompt, default=0) >= self._vocabulary:
                raise invalid(f"The vocabulary has {self._vocabulary} tokens; ids are below that.", param="prompt")
            return list(prompt)
        try:
            return self._conversations.encode(prompt)
        except NotRendered as error:
            raise invalid(f"The prompt cannot be read: {error}.", param="prompt") from error

    def _head(self, kind: str, options: Options) -> dict[str, Any]:
        return {
            "id": f"{kind}-{secrets.token_hex(12)}",
            "created_s": int(time.time()),
            "model": self._name,
            "logprobs": options.logprobs,
            "include_usage": options.include_usage,
        }

    def _generate(self, answer: ChatAnswer | TextAnswer, options: Options, prompts: Sequence[list[int]]) -> Response:
        room = [self._room(len(prompt), options.max_tokens) for prompt in prompts]
        first_seed = secrets.randbits(63) if options.seed is None else options.seed
        turns = []
        for index in range(len(prompts) * options.n):
            sampling = Sampling(
                max_tokens=room[index // options.n],
                temperature=options.temperature,
                stop_tokens=self._conversations.stop_tokens,
                seed=first_seed + index,
                top_p=options.top_p,
                top_k=options.top_k,
            )
            turns.append((Segment.of(prompts[index // options.n]), sampling))
        if len(turns) > self._engine.capacity:
            message = (
                f"The server generates or queues {self._engine.capacity} answers at most; this request wants more."
            )
            raise invalid(message, param="n", code="invalid_value")
        try:
            generation = self._engine.begin(turns)
        except Full as error:
            raise busy(RETRY_AFTER_S) from error
        except NotServed as error:
            raise refusal(error) from error
        lengths = [len(prompt) for prompt in prompts]
        return GenerationResponse(generation, answer, self._conversations, options, lengths)

    def _room(self, length: int, max_tokens: int | None) -> int:
        """Tokens that may be sampled after a prompt."""
        context = self._engine.info.max_context
        if not length:
            raise invalid("The prompt is empty.", param="prompt")
        if length + (max_tokens or 1) > context:
            raise too_long(length, max_tokens, context)
        return max_tokens or context - length


async def _read(request: Request) -> bytes:
    """The body, refused as soon as it is known to be too large."""
    large = ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.", headers={"Connection": "close"})
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > MAX_BODY_BYTES:
        raise large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise large
    except ClientDisconnect as error:
        raise ApiError(400, "The client left.") from error  # to no one
    return bytes(body)


def _as_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


async def _answer_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """Errors of routes, of routing, and bugs; Starlette raises the last again, so that they are logged."""
    if isinstance(error, ApiError):
        return _as_response(error)
    if isinstance(error, HTTPException):
        return _as_response(ApiError(error.status_code, f"{error.detail}.", headers=error.headers))
    return _as_response(ApiError(500, "The server failed on this request; its log says why."))
