"""A bucket as a safetensors file: a header, followed by the bucket's unmodified bytes.

Invariants: the bytes after the header are exactly the bucket, so that its digest is that of the manifest; any reader of
safetensors finds the tensors under their names. Safetensors allows neither gaps nor overlapping tensors: gaps are named
`.gap.<offset>`, a tied tensor appears under its first name, and shard 2 of a split one is `<name>.shard-2`. A bucket
whose entries cannot be expressed this way is one tensor of bytes, `bucket`.
"""

import math
from collections.abc import Iterator

import msgspec

from rollart.types.weights import Manifest

DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
LENGTH_BYTES = 8
ALIGNMENT_BYTES = 64
"""Alignment of the bucket in the file, so that its tensors can be viewed in place."""


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def header(manifest: Manifest, index: int) -> bytes:
    """Safetensors header of this bucket."""
    try:
        tensors = dict(_tensors(manifest, index))
    except ValueError:
        tensors = {"bucket": _bytes(0, manifest.bucket_bytes[index])}
    metadata = {"version": str(manifest.version), "bucket": str(index), "digest": manifest.digests[index]}
    text = msgspec.json.encode({"__metadata__": metadata, **tensors})
    length = -(-(LENGTH_BYTES + len(text)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES - LENGTH_BYTES
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)


def data_start(head: bytes) -> int:
    """Start of the bucket in a file that begins with these `LENGTH_BYTES` bytes."""
    return LENGTH_BYTES + int.from_bytes(head, "little")


def _tensors(manifest: Manifest, index: int) -> Iterator[tuple[str, _Tensor]]:
    """Header entries; raises `ValueError` if entries overlap or are unknown to safetensors."""
    end, seen = 0, set()
    entries = [entry for entry in manifest.tensors if entry.bucket == index]
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        dtype, itemsize = DTYPES.get(entry.dtype, ("", 0))
        place = (entry.offset, entry.nbytes, entry.dtype, entry.shape)
        if place in seen:
            continue
        seen.add(place)
        if not dtype or entry.offset < end or entry.nbytes != itemsize * math.prod(entry.shape):
            raise ValueError(f"{entry.name!r} cannot be a separate tensor")
        if entry.offset > end:
            yield f".gap.{end}", _bytes(end, entry.offset)
        end = entry.offset + entry.nbytes
        name = f"{entry.name}.shard-{entry.shard}" if entry.shard else entry.name
        yield name, _Tensor(dtype, entry.shape, (entry.offset, end))
    if end > manifest.bucket_bytes[index]:
        raise ValueError("the last tensor ends after the bucket")
    if end < manifest.bucket_bytes[index]:
        yield f".gap.{end}", _bytes(end, manifest.bucket_bytes[index])


def _bytes(start: int, end: int) -> _Tensor:
    return _Tensor("U8", (end - start,), (start, end))
