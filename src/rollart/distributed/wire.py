"""Serialisation of messages: one msgpack blob per batch, each message preceded by the name of its type.

Used when workers are in other processes. Token payloads and log-probabilities are sent as raw bytes; nothing is
pickled, so a blob can only decode to one of the types listed here.
"""

from collections.abc import Iterable
from typing import Any, get_args

import msgspec
import numpy as np

from rollart.types.messages import WorkerCommand, WorkerEvent, WorkerInfo
from rollart.types.tokens import PackedSequence, TokenSequence


class Died(msgspec.Struct, frozen=True):
    """The last message of a worker."""

    reason: str


Message = WorkerCommand | WorkerEvent | WorkerInfo | Died


def encode(messages: Iterable[Message]) -> bytes:
    """Encode a batch as one blob. The types of fields are checked when it is decoded."""
    named = [(type(message).__name__, message) for message in messages]
    strange = next((name for name, _ in named if name not in _DECODERS), None)
    if strange is not None:
        raise TypeError(f"{strange} is not a message; workers exchange types.messages")
    return _ENCODER.encode(named)


def decode(blob: bytes) -> list[Message]:
    """Decode a batch, in order."""
    return [_DECODERS[name].decode(body) for name, body in _ENVELOPE.decode(blob)]


def _encode_other(value: object) -> object:
    if isinstance(value, TokenSequence):
        return value.pack()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"a message holds a {type(value).__name__}, which cannot be sent to another process; "
        "messages hold plain data (types.messages)"
    )


def _decode_other(kind: type, value: Any) -> object:
    if kind is TokenSequence:
        return TokenSequence.unpack(msgspec.convert(value, PackedSequence))
    raise TypeError(f"no message type holds a {kind.__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_ENVELOPE = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])
_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind, dec_hook=_decode_other) for kind in get_args(Message)
}
