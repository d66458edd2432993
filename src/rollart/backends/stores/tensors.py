"""Conversion between tensors and buckets: the format of a state dict as a weight version.

Invariants: bytes are those of the tensors, for every dtype (including bfloat16); tensors that share memory are stored
once and share it again after unpacking; no bucket is larger than `bucket_bytes`, and packing holds one at a time. A
tensor that does not fit into one bucket is split along its first dimension into shards, one entry each; `shape` is then
that of the shard.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from msgspec.structs import replace

from rollart.types.errors import RequestError, WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest, TensorEntry, WeightKind, bucket_digest

ALIGNMENT_BYTES = 16
"""Alignment of tensors, so that a reader can view them in place."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Packed:
    """Tensors laid out in buckets. Iterating makes the buckets one at a time, each time anew."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> None:
        """Lay out tensors in the order of the mapping; nothing is copied yet."""
        self.entries: list[TensorEntry] = []
        self.bucket_bytes: list[int] = []
        self._parts: list[list[tuple[int, torch.Tensor]]] = []
        """For each bucket, its tensors and where they start."""
        placed: dict[tuple[object, ...], list[TensorEntry]] = {}
        for name, tensor in tensors.items():
            identity = memory_of(tensor)
            twin = placed.get(identity)
            if twin is None:
                twin = placed[identity] = list(self._place(name, tensor, bucket_bytes))
            self.entries += [_renamed(entry, name) for entry in twin]

    def __iter__(self) -> Iterator[memoryview]:
        for nbytes, parts in zip(self.bucket_bytes, self._parts, strict=True):
            bucket = memoryview(bytearray(nbytes))
            for start, part in parts:
                _write(bucket[start : start + part.nbytes], part)
            yield bucket

    def manifest(self, version: Version, parent: Version | None, kind: WeightKind = WeightKind.FULL) -> Manifest:
        """Manifest with the digests of all buckets, which are made for it one at a time."""
        return Manifest(
            version=version,
            parent=parent,
            kind=kind,
            tensors=tuple(self.entries),
            bucket_bytes=tuple(self.bucket_bytes),
            digests=tuple(bucket_digest(bucket) for bucket in self),
        )

    def shards(self) -> "Shards":
        """The same as one of several parts of a version (`joined`)."""
        digests = tuple(bucket_digest(bucket) for bucket in self)
        return Shards(tuple(self.entries), tuple(self.bucket_bytes), digests)

    def _place(self, name: str, tensor: torch.Tensor, bucket_bytes: int) -> Iterator[TensorEntry]:
        if tensor.dtype not in NAMES:
            raise RequestError(f"tensor {name!r} has dtype {tensor.dtype}, which cannot be published; convert it first")
        for shard, part in enumerate(_shards(name, tensor, bucket_bytes)):
            start = _padded(self.bucket_bytes[-1]) if self.bucket_bytes else 0
            if not self.bucket_bytes or start + part.nbytes > bucket_bytes:
                self.bucket_bytes.append(0)
                self._parts.append([])
                start = 0
            self.bucket_bytes[-1] = start + part.nbytes
            self._parts[-1].append((start, part))
            yield TensorEntry(
                name=name,
                dtype=NAMES[tensor.dtype],
                shape=tuple(part.shape),
                bucket=len(self.bucket_bytes) - 1,
                offset=start,
                nbytes=part.nbytes,
                shard=shard,
            )


class Shards(NamedTuple):
    """Layout and digests of the part of a version that one of several processes has: consecutive rows of tensors."""

    entries: tuple[TensorEntry, ...]
    bucket_bytes: tuple[int, ...]
    digests: tuple[str, ...]


def joined(parts: Sequence[Shards], version: Version, parent: Version | None, kind: WeightKind) -> Manifest:
    """Manifest of a version that consists of these parts: buckets, and shards of a tensor, one part after the other."""
    entries: list[TensorEntry] = []
    seen: dict[str, int] = {}
    """Number of shards of a tensor in the parts before."""
    buckets = 0
    for part in parts:
        counted = dict(seen)
        for entry in part.entries:
            entries.append(replace(entry, bucket=buckets + entry.bucket, shard=seen.get(entry.name, 0) + entry.shard))
            counted[entry.name] = counted.get(entry.name, 0) + 1
        seen = counted
        buckets += len(part.bucket_bytes)
    return Manifest(
        version=version,
        parent=parent,
        kind=kind,
        tensors=tuple(entries),
        bucket_bytes=tuple(nbytes for part in parts for nbytes in part.bucket_bytes),
        digests=tuple(digest for part in parts for digest in part.digests),
    )


def pack(
    tensors: Mapping[str, torch.Tensor],
    *,
    version: Version,
    parent: Version | None,
    bucket_bytes: int,
    kind: WeightKind = WeightKind.FULL,
) -> tuple[Manifest, list[bytes]]:
    """Pack tensors into a version and the bytes of all its buckets."""
    packed = Packed(tensors, bucket_bytes)
    return packed.manifest(version, parent, kind), [bytes(bucket) for bucket in packed]


def unpack(manifest: Manifest, buckets: Sequence[bytes | bytearray | memoryview]) -> dict[str, torch.Tensor]:
    """Unpack a version into CPU tensors with their own memory. The caller has verified the digests."""
    if len(buckets) != len(manifest.bucket_bytes):
        raise WeightError(f"{manifest.version} has {len(manifest.bucket_bytes)} buckets, but {len(buckets)} were given")
    read: dict[tuple[int, int, str, tuple[int, ...]], torch.Tensor] = {}
    parts: dict[str, dict[int, tuple[TensorEntry, torch.Tensor]]] = {}
    for entry in manifest.tensors:
        place = (entry.bucket, entry.offset, entry.dtype, entry.shape)
        if place not in read:
            read[place] = _read(manifest, entry, buckets)
        parts.setdefault(entry.name, {})[entry.shard] = (entry, read[place])
    joined: dict[tuple[int, ...], torch.Tensor] = {}
    out: dict[str, torch.Tensor] = {}
    for name, shards in parts.items():
        if sorted(shards) != list(range(len(shards))):
            raise WeightError(f"{manifest.version}: tensor {name!r} has the shards {sorted(shards)}, some are missing")
        ordered = [shards[index][1] for index in range(len(shards))]
        if len(ordered) == 1:
            out[name] = ordered[0]
            continue
        twins = tuple(id(part) for part in ordered)
        if twins not in joined:
            joined[twins] = torch.cat(ordered)
        out[name] = joined[twins]
    return out


def verify_fit(tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], version: Version) -> None:
    """Raise `WeightError` unless these are exactly the tensors of a model.

    Shapes must be equal; a floating dtype may differ from the model's, which converts (a trainer in float32 feeds an
    engine in bfloat16), any other dtype must be equal.
    """
    missing = [name for name in wanted if name not in tensors]
    unknown = [name for name in tensors if name not in wanted]
    if missing or unknown:
        raise WeightError(
            f"{version} is not for this model: missing {missing[:3] or 'nothing'}, unknown {unknown[:3] or 'nothing'}. "
            "Give engine and trainer the same model."
        )
    for name, want in wanted.items():
        got = tensors[name]
        converts = got.dtype.is_floating_point and want.dtype.is_floating_point
        if got.shape != want.shape or (got.dtype != want.dtype and not converts):
            raise WeightError(
                f"{version}: tensor {name!r} is {got.dtype} {tuple(got.shape)}, "
                f"the model wants {want.dtype} {tuple(want.shape)}. Give engine and trainer the same model."
            )


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Key that is equal for tensors with the same memory, such as tied weights."""
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _shards(name: str, tensor: torch.Tensor, bucket_bytes: int) -> Iterator[torch.Tensor]:
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= bucket_bytes:
        yield tensor
        return
    row_bytes = nbytes // tensor.shape[0] if tensor.dim() else nbytes
    if row_bytes > bucket_bytes:
        raise RequestError(
            f"tensor {name!r} has rows of {row_bytes} bytes, more than a bucket of {bucket_bytes}; raise bucket_bytes"
        )
    yield from torch.split(tensor, bucket_bytes // row_bytes)


def _write(place: memoryview, tensor: torch.Tensor) -> None:
    if place.nbytes:
        torch.frombuffer(place, dtype=tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _read(manifest: Manifest, entry: TensorEntry, buckets: Sequence[bytes | bytearray | memoryview]) -> torch.Tensor:
    where = f"{manifest.version}: tensor {entry.name!r}"
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise WeightError(f"{where} has the unknown dtype {entry.dtype!r}; this version needs a newer rollart")
    if entry.nbytes != math.prod(entry.shape) * dtype.itemsize:
        raise WeightError(f"{where} of {entry.dtype} {entry.shape} cannot be {entry.nbytes} bytes; publish it again")
    end = entry.offset + entry.nbytes
    if not 0 <= entry.bucket < len(buckets) or entry.offset < 0 or end > len(buckets[entry.bucket]):
        raise WeightError(f"{where} lies outside of bucket {entry.bucket}; publish the version again")
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    data = bytearray(memoryview(buckets[entry.bucket])[entry.offset : end])
    return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)


def _renamed(entry: TensorEntry, name: str) -> TensorEntry:
    return replace(entry, name=name)


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
