"""Publication of versions from a trainer to the store, optionally concurrent with the next step.

    start ──► a draft: the weights as they are now ──► thread: its manifest and buckets ──► store

Invariants:
- At most one publication is in flight, so there is at most one copy of the weights besides those being trained, and
  one bucket.
- The published weights are those at the time of `start`, whatever is trained meanwhile, if `start` was given a copy.
- Publishing a version again returns the existing manifest. The last `keep` versions are kept, as is the full version
  that any adapter among them is based on.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from rollart.backends.stores.tensors import Packed
from rollart.backends.trainers.sharding import identity, whole
from rollart.ports.weights import WeightStore
from rollart.types.errors import WeightError
from rollart.types.messages import Published, TrainerFailed
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind

Answer = Published | TrainerFailed


class Draft(Protocol):
    """Weights to be published, which further training does not change."""

    def write(self, store: WeightStore) -> Manifest:
        """Publish them; raises `WeightError`, with nothing published."""
        ...


Drafting = Callable[[Version, Version | None, WeightKind], Draft]
"""Makes the draft of a version with this parent and kind; raises `WeightError` if the store refuses it."""


class WholeDraft:
    """A version whose tensors are all in this process."""

    def __init__(
        self,
        version: Version,
        parent: Version | None,
        kind: WeightKind,
        tensors: Mapping[str, torch.Tensor],
        bucket_bytes: int,
    ) -> None:
        self._packed = Packed(tensors, bucket_bytes)
        self._named = version, parent, kind

    def write(self, store: WeightStore) -> Manifest:
        manifest = self._packed.manifest(*self._named)
        store.publish(manifest, self._packed)
        return manifest


class Publisher:
    """Publishes versions. With `wake`, in its own thread, calling it when a version is done; without, synchronously."""

    def __init__(self, store: WeightStore, *, keep: int, wake: Callable[[], None] | None = None) -> None:
        self._store = store
        self._keep = keep
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, "publisher") if wake is not None else None
        self._published: list[Manifest] = []

    @property
    def base(self) -> Version | None:
        """The full version that an adapter can be based on."""
        full = [manifest.version for manifest in self._published if manifest.kind is WeightKind.FULL]
        return full[-1] if full else None

    def start(self, version: Version, drafting: Drafting, kind: WeightKind = WeightKind.FULL) -> "Future[Answer]":
        """Publish a version; `drafting` is called only if it is new. Not while another publication is in flight."""
        answer: Future[Answer] = Future()
        if self._published and self._published[-1].version == version:
            answer.set_result(Published(self._published[-1]))  # a duplicate command
            return answer
        before = self._published[-1].version if self._published else None
        try:
            draft = drafting(version, self.base if kind is WeightKind.ADAPTER else before, kind)
        except WeightError as error:
            answer.set_result(_failed(version, error))
            return answer
        if self._thread is None or self._wake is None:
            answer.set_result(self._publish(version, draft))
        else:
            answer = self._thread.submit(self._publish, version, draft)
            wake = self._wake
            answer.add_done_callback(lambda _: wake())
        return answer

    def close(self) -> None:
        """Waits for a publication in flight, so that no half-written version is left behind."""
        if self._thread is not None:
            self._thread.shutdown()

    def _publish(self, version: Version, draft: Draft) -> Answer:
        try:
            manifest = draft.write(self._store)
        except WeightError as error:
            return _failed(version, error)
        self._published.append(manifest)
        self._retire()
        return Published(manifest)

    def _retire(self) -> None:
        recent = self._published[-self._keep :]
        bases = {manifest.depends_on for manifest in recent}
        for old in reversed(self._published[: -self._keep]):  # adapters before what they are on
            if old.version not in bases:
                self._published.remove(old)
                self._store.drop(old.version)


def _failed(version: Version, error: WeightError) -> TrainerFailed:
    return TrainerFailed(None, f"cannot publish {version}: {error}")


class Snapshot:
    """A copy of tensors on the CPU, in a reused buffer; tensors that share memory share it here too.

    On `meta` it is a copy without storage, for ranks that only take part in the gather. With `view`, what is copied of
    a tensor: by default the whole of it.
    """

    def __init__(
        self, dtype: torch.dtype, device: str = "cpu", view: Callable[[torch.Tensor], torch.Tensor] = whole
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._view = view
        self._copies: dict[str, torch.Tensor] = {}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Valid until the next `take`. Floating-point tensors are converted."""
        copied: dict[object, torch.Tensor] = {}
        for name, tensor in tensors.items():
            memory = identity(tensor)
            twin = copied.get(memory)
            if twin is not None:
                self._copies[name] = twin
                continue
            seen = self._view(tensor)
            if name not in self._copies:
                dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
                self._copies[name] = torch.empty(seen.shape, dtype=dtype, device=self._device)
            copied[memory] = self._copies[name].copy_(seen)
        return self._copies
