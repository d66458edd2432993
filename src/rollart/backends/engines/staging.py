"""Weight versions beside the one in service: fetched and prepared in slices, so that generation goes on between them.

What holds: a version is ready only when every bucket has the digest of its manifest, its tensors are exactly those of
the model, and the engine has prepared them. Whatever fails on the way costs that version, never the one in service.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from rollart.backends.stores.tensors import unpack, verify_fit
from rollart.ports.weights import WeightStore
from rollart.types.errors import WeightError
from rollart.types.messages import Staged, StageFailed
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind, verify_bucket

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]
Prepare = Callable[[Tensors], Generator[None, None, T]]
"""Makes of a version's tensors what the engine serves with; every `yield` ends a slice."""


def as_they_are(tensors: Tensors) -> Generator[None, None, Tensors]:
    """For an engine that takes a state dict."""
    yield from ()
    return tensors


@dataclass
class _Fetching(Generic[T]):
    manifest: Manifest
    buckets: list[bytes | memoryview] = field(default_factory=list)
    preparing: Generator[None, None, T] | None = None


class Staging(Generic[T]):
    """The versions of one engine that are being fetched or are ready."""

    def __init__(
        self,
        store: WeightStore,
        wanted: Mapping[str, torch.Tensor],
        prepare: Prepare[T] = as_they_are,  # type: ignore[assignment]  # without one, T is the tensors
    ) -> None:
        self._store = store
        self._wanted = wanted
        self._prepare = prepare
        self._fetching: dict[Version, _Fetching[T]] = {}
        self._ready: dict[Version, T] = {}

    @property
    def busy(self) -> bool:
        return bool(self._fetching)

    def begin(self, manifest: Manifest) -> Staged | None:
        """Start to fetch; a version that is ready is said to be so again, one under way is left alone."""
        version = manifest.version
        if version in self._ready:
            return Staged(version)
        self._fetching.setdefault(version, _Fetching(manifest))
        return None

    def slice(self) -> Staged | StageFailed | None:
        """Fetch and verify one bucket, or prepare a part; says so when a version got ready or failed."""
        version, fetching = next(iter(self._fetching.items()))
        try:
            self._work(version, fetching)
        except StopIteration as end:
            self._ready[version] = end.value
        except Exception as error:  # noqa: BLE001 - the store may be anybody's: what it raises fails this version only
            del self._fetching[version]
            return StageFailed(version, f"{type(error).__name__}: {error}")
        else:
            return None
        del self._fetching[version]
        return Staged(version)

    def take(self, version: Version) -> T | None:
        """What was prepared of a ready version, None if it is not ready. Older ones are forgotten with it."""
        taken = self._ready.get(version)
        if taken is not None:
            self._ready = {other: kept for other, kept in self._ready.items() if other > version}
            self._fetching = {other: kept for other, kept in self._fetching.items() if other > version}
        return taken

    def _work(self, version: Version, fetching: _Fetching[T]) -> None:
        """One slice; raises `StopIteration` with what was prepared when nothing is left to do."""
        manifest, buckets = fetching.manifest, fetching.buckets
        if manifest.kind is not WeightKind.FULL:
            raise WeightError(f"{version} is a version of kind {manifest.kind.value}; this engine takes full ones")
        if fetching.preparing is None:
            if len(buckets) < len(manifest.digests):
                data = self._store.bucket(version, len(buckets))
                verify_bucket(manifest, len(buckets), data)
                buckets.append(data)
            if len(buckets) < len(manifest.digests):
                return
            tensors = unpack(manifest, buckets)
            verify_fit(tensors, self._wanted, version)
            fetching.preparing = self._prepare(tensors)
            buckets.clear()
        next(fetching.preparing)
