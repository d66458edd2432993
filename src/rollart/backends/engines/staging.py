"""Weight versions beside the one in service: pulled in a thread and prepared in slices, while generation continues.

Invariants: a version is ready only when every bucket matches the digest in its manifest, its tensors are exactly those
of the model, and the engine has prepared them. A failure affects only that version, never the one in service.
An adapter is merged into the full version that it is based on. With the first adapter that version is pulled again and
kept as published, so that every later one costs no more than its factors.
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
from rollart.types.errors import InvariantBroken, WeightError
from rollart.types.messages import Staged, StageFailed
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind, verify_bucket

SLICE_S = 0.004
"""Time spent preparing parts between two engine steps: enough for all of a small model, for which a step per part would
delay training that waits for the engines, and for one part of a large one."""
T = TypeVar("T")
Tensors = dict[str, torch.Tensor]
Prepare = Callable[[Tensors], Generator[None, None, T]]
"""Converts a version's tensors to what the engine serves with; every `yield` ends a slice."""


def as_they_are(tensors: Tensors) -> Generator[None, None, Tensors]:
    """For engines that take a state dict."""
    yield from ()
    return tensors


class Staging(Generic[T]):
    """Versions of one engine that are being pulled or are ready."""

    def __init__(
        self,
        store: WeightStore,
        wanted: Mapping[str, torch.Tensor],
        prepare: Prepare[T] = as_they_are,  # type: ignore[assignment]  # without one, T is the tensors
        *,
        adapters: bool = True,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """Without `adapters`, only full versions are accepted: the served weights are not made here.

        With `wake`, buckets are pulled and verified in a thread, which calls it when one has arrived; without, by
        `slice` itself.
        """
        self._store = store
        self._wanted = wanted
        self._prepare = prepare
        self._adapters = adapters
        self._base: tuple[Version, Tensors] | None = None
        """The full version that adapters are based on."""
        self._wake = wake
        self._bucket: Future[bytes | memoryview] | None = None
        """The bucket being pulled."""
        self._fetching: dict[Version, Generator[None, None, T]] = {}
        self._ready: dict[Version, T] = {}

    @property
    def due(self) -> bool:
        """Whether a `slice` would make progress; the arrival of a bucket is signalled by `wake`."""
        return bool(self._fetching) and (self._bucket is None or self._bucket.done())

    def begin(self, manifest: Manifest) -> None:
        """Start to pull a version that is neither ready nor in progress."""
        self._fetching[manifest.version] = self._making(manifest)

    def slice(self) -> Staged | StageFailed | None:
        """Pull and verify a bucket, or prepare parts for a moment; returns an event if a version is ready or failed."""
        version, fetching = next(iter(self._fetching.items()))
        until = time.perf_counter() + SLICE_S
        try:
            next(fetching)
            while self.due and time.perf_counter() < until:
                next(fetching)
        except StopIteration as end:
            self._ready[version] = end.value
        except Exception as error:  # noqa: BLE001 - the store may be third-party: its errors fail only this version
            del self._fetching[version]
            return StageFailed(version, f"{type(error).__name__}: {error}")
        else:
            return None
        del self._fetching[version]
        return Staged(version)

    def take(self, version: Version) -> T:
        """Return the prepared weights of a ready version, and forget older ones."""
        if version not in self._ready:
            raise InvariantBroken(f"{version} is to be loaded but not staged; this is a bug of rollart")
        taken = self._ready[version]
        self._ready = {other: kept for other, kept in self._ready.items() if other > version}
        self._fetching = {other: kept for other, kept in self._fetching.items() if other > version}
        return taken

    def close(self) -> None:
        self._fetching.clear()
        self._ready.clear()

    def _making(self, manifest: Manifest) -> Generator[None, None, T]:
        """Make the served weights, slice by slice."""
        if manifest.kind is WeightKind.FULL:
            tensors = yield from self._fetch(manifest)
        elif manifest.kind is WeightKind.ADAPTER and self._adapters:
            tensors = yield from self._merge(manifest)
        else:
            raise WeightError(
                f"{manifest.version} is a version of kind {manifest.kind.value}, which this engine does not support: "
                "let the trainer publish full ones (`lora.publish` = merged)"
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
        """Pull a bucket in a daemon thread, since a store may hang."""
        coming: Future[bytes | memoryview] = Future()
        coming.add_done_callback(lambda _: wake())

        def fetch() -> None:
            try:
                coming.set_result(self._verified(manifest, index))
            except BaseException as error:  # noqa: BLE001 - raised in the caller through the future
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
