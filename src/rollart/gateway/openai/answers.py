"""Answers of the OpenAI API: whole, or as chunks of a stream.

An answer has choices, each made of `Piece`s in order; the last piece of a choice has a finish reason. The same pieces
make the whole answer and the chunks:

    begin ─► chunk, chunk, … of all choices, interleaved ─► usage, if asked for ─► DONE
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

Finish = Literal["stop", "length"]
DONE = b"data: [DONE]\n\n"
"""End of a stream."""


class TokenLogprob(msgspec.Struct):
    """A sampled token. `bytes` is None where the token is only a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: tuple[()] = ()


class Piece(NamedTuple):
    """What a choice gained: text, and with logprobs its tokens. Their text may come a piece later."""

    text: str
    tokens: Sequence[TokenLogprob] = ()
    finish: Finish | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of a request; every sampled token counts, also the one that ended the answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _Cached = msgspec.field(default_factory=_Cached)

    @staticmethod
    def of(prompt: int, completion: int, cached: int) -> "Usage":
        """`cached`: prompt tokens that the engine had computed before."""
        return Usage(prompt, completion, prompt + completion, _Cached(cached))


class Answer(Protocol):
    """How one of the endpoints words its answers. All return JSON."""

    def begin(self, index: int) -> bytes | None:
        """First chunk of a choice, before its first piece."""
        ...

    def chunk(self, index: int, piece: Piece) -> bytes: ...

    def usage(self, usage: Usage) -> bytes:
        """Last chunk of a stream whose client asked for it."""
        ...

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes: ...


def event(data: bytes) -> bytes:
    """A server-sent event.

    >>> event(b"{}")
    b'data: {}\\n\\n'
    """
    return b"data: " + data + b"\n\n"


def models(name: str, created_s: int) -> bytes:
    """Answer of `/v1/models`."""
    return msgspec.json.encode({"object": "list", "data": [_model(name, created_s)]})


def model(name: str, created_s: int) -> bytes:
    """Answer of `/v1/models/NAME`."""
    return msgspec.json.encode(_model(name, created_s))


def _model(name: str, created_s: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created_s, "owned_by": "rollart"}


class _Head(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: Any
    usage: Usage | UnsetType | None = UNSET


class _Words:
    """What both kinds of answers share. A stream with usage has `usage: null` in all chunks but the last."""

    _chunk_object: str
    _object: str

    def __init__(self, *, id: str, created_s: int, model: str, logprobs: bool, include_usage: bool) -> None:
        self._id, self._created, self._model = id, created_s, model
        self._logprobs = logprobs
        self._no_usage: UnsetType | None = None if include_usage else UNSET

    def usage(self, usage: Usage) -> bytes:
        return self._head(self._chunk_object, [], usage)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._head(self._chunk_object, [choice], self._no_usage)

    def _head(self, kind: str, choices: list[dict[str, Any]], usage: Usage | UnsetType | None) -> bytes:
        return msgspec.json.encode(_Head(self._id, kind, self._created, self._model, choices, usage))


class ChatAnswer(_Words):
    """Answers of `/v1/chat/completions`; an `Answer`."""

    _object, _chunk_object = "chat.completion", "chat.completion.chunk"

    def begin(self, index: int) -> bytes:
        return self._chunk(self._choice(index, {"role": "assistant", "content": ""}))

    def chunk(self, index: int, piece: Piece) -> bytes:
        delta = {"content": piece.text} if piece.text or piece.tokens else {}
        return self._chunk(self._choice(index, delta, piece.tokens, piece.finish))

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        out = []
        for index, pieces in enumerate(choices):
            message = {"role": "assistant", "content": _text(pieces), "refusal": None}
            choice = self._choice(index, message, _tokens(pieces), pieces[-1].finish)
            choice["message"] = choice.pop("delta")
            out.append(choice)
        return self._head(self._object, out, usage)

    def _choice(
        self, index: int, delta: dict[str, Any], tokens: Sequence[TokenLogprob] = (), finish: Finish | None = None
    ) -> dict[str, Any]:
        logprobs = {"content": tokens, "refusal": None} if self._logprobs else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


class TextAnswer(_Words):
    """Answers of `/v1/completions`; an `Answer`."""

    _object = _chunk_object = "text_completion"

    def begin(self, index: int) -> None:  # noqa: ARG002 - nothing to say
        return None

    def chunk(self, index: int, piece: Piece) -> bytes:
        return self._chunk(self._choice(index, piece.text, piece.tokens, piece.finish))

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        out = [
            self._choice(index, _text(pieces), _tokens(pieces), pieces[-1].finish)
            for index, pieces in enumerate(choices)
        ]
        return self._head(self._object, out, usage)

    def _choice(self, index: int, text: str, tokens: Sequence[TokenLogprob], finish: Finish | None) -> dict[str, Any]:
        logprobs = {
            "tokens": [each.token for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": None,
        }
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs if self._logprobs else None,
            "finish_reason": finish,
        }


def _text(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _tokens(pieces: Iterable[Piece]) -> list[TokenLogprob]:
    return [token for piece in pieces for token in piece.tokens]
