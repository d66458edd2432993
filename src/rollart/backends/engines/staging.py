"""Weight versions beside the one in service: fetched in a thread and prepared in slices, while generation goes on.

What holds: a version is ready only when every bucket has the digest of its manifest, its tensors are exactly those of
the model, and the engine has prepared them. Whatever fails on the way costs that version, never the one in service.
An adapter is merged into the full version that it is on. With the first of them that version is fetched again and kept
as it was published, so that every later one costs no more than its factors.
"""

import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Generic, TypeVar

import torch

from rollart.backends.stores.adapters import merge
from rollart.backends.stores.tensors import unpack, verify_fit
from rollart.ports.weights import WeightStore
from rollart.types.errors import WeightError
from rollart.types.messages import Staged, StageFailed
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind, verify_bucket

SLICE_S = 0.004
"""So long parts are prepared between two engine steps: the whole of a small model, for which a step per part would be a
long way while training waits for the engines, and one part of a large one."""
T = TypeVar("T")
Tensors = dict[str, torch.Tensor]
Prepare = Callable[[Tensors], Generator[None, None, T]]
"""Makes of a version's tensors what the engine serves with; every `yield` ends a slice."""


def as_they_are(tensors: Tensors) -> Generator[None, None, Tensors]:
    """For an engine that takes a state dict."""
    yield from ()
    return tensors


class Staging(Generic[T]):
    """The versions of one engine that are being fetched or are ready."""

    def __init__(
        self,
        store: WeightStore,
        wanted: Mapping[str, torch.Tensor],
        prepare: Prepare[T] = as_they_are,  # type: ignore[assignment]  # without one, T is the tensors
        *,
        adapters: bool = True,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """Without `adapters`, only full versions are taken: what the engine serves with is not made here.

        With `wake`, buckets are fetched and verified in a thread, and it is called when one is there; without, by
        `slice` itself.
        """
        self._store = store
        self._wanted = wanted
        self._prepare = prepare
        self._adapters = adapters
        self._base: tuple[Version, Tensors] | None = None
        """The full version that adapters are on."""
        self._wake = wake
        self._bucket: Future[bytes | memoryview] | None = None
        """On its way."""
        self._fetching: dict[Version, Generator[None, None, T]] = {}
        self._ready: dict[Version, T] = {}

    @property
    def due(self) -> bool:
        """Whether a `slice` would get something done; what is on its way says so by `wake`."""
        return bool(self._fetching) and (self._bucket is None or self._bucket.done())

    def begin(self, manifest: Manifest) -> Staged | None:
        """Start to fetch; a version that is ready is said to be so again, one under way is left alone."""
        version = manifest.version
        if version in self._ready:
            return Staged(version)
        self._fetching.setdefault(version, self._making(manifest))
        return None

    def slice(self) -> Staged | StageFailed | None:
        """Fetch and verify a bucket, or prepare parts for a moment; says so when a version got ready or failed."""
        version, fetching = next(iter(self._fetching.items()))
        until = time.perf_counter() + SLICE_S
        try:
            next(fetching)
            while self.due and time.perf_counter() < until:
                next(fetching)
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

    def close(self) -> None:
        self._fetching.clear()
        self._ready.clear()

    def _making(self, manifest: Manifest) -> Generator[None, None, T]:
        """What is served with, slice by slice."""
        if manifest.kind is WeightKind.FULL:
            tensors = yield from self._fetch(manifest)
        elif manifest.kind is WeightKind.ADAPTER and self._adapters:
            tensors = yield from self._merge(manifest)
        else:
            raise WeightError(
                f"{manifest.version} is a version of kind {manifest.kind.value}, which this engine does not take: let "
                "the trainer publish full ones (`lora.publish` = merged)"
            )
        verify_fit(tensors, self._wanted, manifest.version)
        return (yield from self._prepare(tensors))

    def _fetch(self, manifest: Manifest) -> Generator[None, None, Tensors]:
        buckets: list[bytes | memoryview] = []
        for index in range(len(manifest.digests)):
            if self._wake is None:
                if index:
                    yield
                buckets.append(self._verified(manifest, index))
                continue
            coming = self._bucket = self._start(manifest, index, self._wake)
            while not coming.done():
                yield
            buckets.append(coming.result())
        return unpack(manifest, buckets)

    def _start(self, manifest: Manifest, index: int, wake: Callable[[], None]) -> "Future[bytes | memoryview]":
        """A thread that nobody waits for: a store may hang."""
        coming: Future[bytes | memoryview] = Future()
        coming.add_done_callback(lambda _: wake())

        def fetch() -> None:
            try:
                coming.set_result(self._verified(manifest, index))
            except BaseException as error:  # noqa: BLE001 - told to who asked for the bucket
                coming.set_exception(error)

        Thread(target=fetch, name=f"stage {manifest.version}/{index}", daemon=True).start()
        return coming

    def _verified(self, manifest: Manifest, index: int) -> bytes | memoryview:
        data = self._store.bucket(manifest.version, index)
        verify_bucket(manifest, index, data)
        return data

    def _merge(self, manifest: Manifest) -> Generator[None, None, Tensors]:
        factors = yield from self._fetch(manifest)
        base = manifest.parent
        if base is None:
            raise WeightError(f"{manifest.version} is an adapter on no version; publish it again")
        if self._base is None or self._base[0] != base:
            self._base = None
            yield
            self._base = (base, (yield from self._fetch(self._store.manifest(base))))
        return (yield from merge(self._base[1], factors))
