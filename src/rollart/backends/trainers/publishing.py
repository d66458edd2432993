"""Publication of versions from a trainer to the store, optionally concurrent with the next step.

Invariants:
- At most one publication is in flight, so there is at most one copy of the weights besides those being trained.
- The published weights are those at the time of `start`, whatever is trained meanwhile, if `start` was given a copy.
- Publishing a version again returns the existing manifest. The last `keep` versions are kept, as is the full version
  that any adapter among them is based on.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from rollart.backends.stores.tensors import pack
from rollart.backends.trainers.sharding import identity, whole
from rollart.ports.weights import WeightStore
from rollart.types.errors import WeightError
from rollart.types.messages import Published, TrainerFailed
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind

Answer = Published | TrainerFailed


class Publisher:
    """Publishes versions. With `wake`, in its own thread, calling it when a version is done; without, synchronously."""

    def __init__(
        self, store: WeightStore, *, bucket_bytes: int, keep: int, wake: Callable[[], None] | None = None
    ) -> None:
        self._store = store
        self._bucket_bytes = bucket_bytes
        self._keep = keep
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, "publisher") if wake is not None else None
        self._published: list[Manifest] = []

    @property
    def base(self) -> Version | None:
        """The full version that an adapter can be based on."""
        full = [manifest.version for manifest in self._published if manifest.kind is WeightKind.FULL]
        return full[-1] if full else None

    def start(
        self,
        version: Version,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        kind: WeightKind = WeightKind.FULL,
    ) -> "Future[Answer]":
        """Publish a version; `tensors` is called only if it is new. Not while another publication is in flight."""
        answer: Future[Answer] = Future()
        if self._published and self._published[-1].version == version:
            answer.set_result(Published(self._published[-1]))  # a duplicate command
        elif self._thread is None or self._wake is None:
            answer.set_result(self._publish(version, tensors(), kind))
        else:
            answer = self._thread.submit(self._publish, version, tensors(), kind)
            wake = self._wake
            answer.add_done_callback(lambda _: wake())
        return answer

    def close(self) -> None:
        """Waits for a publication in flight, so that no half-written version is left behind."""
        if self._thread is not None:
            self._thread.shutdown()

    def _publish(self, version: Version, tensors: Mapping[str, torch.Tensor], kind: WeightKind) -> Answer:
        before = self._published[-1].version if self._published else None
        parent = self.base if kind is WeightKind.ADAPTER else before
        manifest, buckets = pack(tensors, version=version, parent=parent, bucket_bytes=self._bucket_bytes, kind=kind)
        try:
            self._store.publish(manifest, buckets)
        except WeightError as error:
            return TrainerFailed(None, f"cannot publish {version}: {error}")
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


class Snapshot:
    """A copy of tensors on the CPU, in a reused buffer; tensors that share memory share it here too.

    On `meta` it is a copy without storage, for ranks that only take part in the gather.
    """

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        self._dtype = dtype
        self._device = device
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
            if name not in self._copies:
                dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
                self._copies[name] = torch.empty(tensor.shape, dtype=dtype, device=self._device)
            copied[memory] = self._copies[name].copy_(whole(tensor))
        return self._copies
