"""An answer on its way to the client: from an engine's parts to OpenAI's pieces, whole or as a stream.

Invariant: when the client is gone, or the answer has ended in any way, the engine works on none of its turns.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollart.app.serving.engine import Generation, NotServed, Part
from rollart.backends.environments.conversation import Conversations
from rollart.gateway.openai.answers import DONE, Answer, Finish, Piece, TokenLogprob, Usage, event
from rollart.gateway.openai.errors import ApiError, invalid, unavailable
from rollart.gateway.openai.requests import Options
from rollart.gateway.text_stream import UNFINISHED, TextStream
from rollart.types.messages import FinishReason

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class _Choice:
    """One choice: its text so far."""

    def __init__(self, conversations: Conversations, options: Options) -> None:
        self._conversations = conversations
        self._logprobs = options.logprobs
        self._stops = options.stop
        self._stream = TextStream(conversations.text, options.stop)
        self._finish: Finish | None = None
        self.sampled = 0
        self.cached = 0

    def take(self, part: Part) -> Piece | None:
        """The piece that a part makes; None if there is nothing to say, as after the finish."""
        if part.finish is not None:
            self.cached = part.cached
        if self._finish is not None:
            return None
        text, count = self._text(part.tokens)
        self.sampled += count
        if part.finish is not None:
            text += self._stream.finish()
        if self._stream.stopped or part.finish is FinishReason.STOP:
            self._finish = "stop"
        elif part.finish is not None:
            self._finish = "length"
        tokens = []
        if self._logprobs:
            tokens = [self._token(*each) for each in zip(part.tokens[:count], part.logprobs[:count], strict=True)]
        return Piece(text, tokens, self._finish) if text or tokens or self._finish else None

    def _text(self, tokens: Sequence[int]) -> tuple[str, int]:
        """The text that these tokens add, and how many belong to the answer: all up to the end of a stop string."""
        if not self._stops:
            return self._stream.feed(tokens), len(tokens)
        text = ""
        for count, token in enumerate(tokens, start=1):
            text += self._stream.feed([token])
            if self._stream.stopped:
                return text, count
        return text, len(tokens)

    @property
    def stopped(self) -> bool:
        """Whether its text has ended, though the engine may go on."""
        return self._stream.stopped

    def _token(self, id: int, logprob: float) -> TokenLogprob:
        text = self._conversations.token(id)
        return TokenLogprob(text, logprob, None if UNFINISHED in text else list(text.encode()))


class GenerationResponse(Response):
    """Answers a request with what its generation yields."""

    def __init__(
        self, generation: Generation, answer: Answer, conversations: Conversations, options: Options, prompts: list[int]
    ) -> None:
        """`prompts`: their lengths in tokens; each has `options.n` choices, in order."""
        self._generation = generation
        self._answer = answer
        self._options = options
        self._prompts = prompts
        self._choices = [_Choice(conversations, options) for _ in range(len(prompts) * options.n)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._close_when_gone(receive))
        try:
            if self._options.stream:
                await self._stream(send)
            else:
                await self._whole(scope, receive, send)
        finally:
            self._generation.close()
            watch.cancel()

    async def _close_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.close()

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        async for part in self._generation:
            choice = self._choices[part.choice]
            piece = choice.take(part)
            if choice.stopped and part.finish is None:
                self._generation.end(part.choice)
            if piece is not None:
                yield part.choice, piece

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices: list[list[Piece]] = [[] for _ in self._choices]
        try:
            async for index, piece in self._pieces():
                choices[index].append(piece)
        except NotServed as error:
            raise refusal(error) from error
        if self._generation.closed:
            return
        body = self._answer.whole(choices, self._usage())
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        begun = [self._answer.begin(index) for index in range(len(self._choices))]
        await _send(send, b"".join(event(chunk) for chunk in begun if chunk is not None))
        try:
            async for index, piece in self._pieces():
                await _send(send, event(self._answer.chunk(index, piece)))
        except NotServed as error:
            # The status is out: clients read the error from the stream.
            await _send(send, event(refusal(error).body()), more=False)
            return
        if self._generation.closed:
            return
        last = event(self._answer.usage(self._usage())) if self._options.include_usage else b""
        await _send(send, last + DONE, more=False)

    def _usage(self) -> Usage:
        cached = sum(choice.cached for choice in self._choices[:: self._options.n])
        return Usage.of(sum(self._prompts), sum(choice.sampled for choice in self._choices), cached)


def refusal(error: NotServed) -> ApiError:
    return unavailable(f"{error}.") if error.lost else invalid(f"The engine refuses the request: {error}.")


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
