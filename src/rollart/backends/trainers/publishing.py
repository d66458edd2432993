"""Versions on their way from a trainer to the store, beside the next step if the trainer wants it so.

What holds:
- at most one version is on its way, so there is at most one copy of the weights besides those that are trained;
- what is published are the weights at the moment of `start`, whatever is trained meanwhile, if `start` got a copy;
- a version published again is answered by what was published; of the versions that were, the last `keep` stay.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from rollart.backends.stores.tensors import memory_of, pack
from rollart.ports.weights import WeightStore
from rollart.types.errors import WeightError
from rollart.types.messages import Published, TrainerFailed
from rollart.types.versions import Version
from rollart.types.weights import Manifest

Answer = Published | TrainerFailed


class Publisher:
    """Writes versions. With `wake`, in a thread of its own that calls it when a version is there; without, at once."""

    def __init__(
        self, store: WeightStore, *, bucket_bytes: int, keep: int, wake: Callable[[], None] | None = None
    ) -> None:
        self._store = store
        self._bucket_bytes = bucket_bytes
        self._keep = keep
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, "publisher") if wake is not None else None
        self._published: list[Manifest] = []

    def start(self, version: Version, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> "Future[Answer]":
        """Publish these, which are asked for only if the version is not there yet. Not while another is on its way."""
        answer: Future[Answer] = Future()
        if self._published and self._published[-1].version == version:
            answer.set_result(Published(self._published[-1]))  # a doubled command
        elif self._thread is None or self._wake is None:
            answer.set_result(self._publish(version, tensors()))
        else:
            answer = self._thread.submit(self._publish, version, tensors())
            wake = self._wake
            answer.add_done_callback(lambda _: wake())
        return answer

    def close(self) -> None:
        """Waits for what is on its way: nobody else would notice a half-written version."""
        if self._thread is not None:
            self._thread.shutdown()

    def _publish(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> Answer:
        parent = self._published[-1].version if self._published else None
        manifest, buckets = pack(tensors, version=version, parent=parent, bucket_bytes=self._bucket_bytes)
        try:
            self._store.publish(manifest, buckets)
        except WeightError as error:
            return TrainerFailed(None, f"{version} was not published: {error}")
        self._published.append(manifest)
        while len(self._published) > self._keep:
            self._store.drop(self._published.pop(0).version)
        return Published(manifest)


class Snapshot:
    """A copy of tensors on the CPU, in memory that is used again and again; those that share memory share it here."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._copies: dict[str, torch.Tensor] = {}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Valid until the next `take`. Floating tensors are converted."""
        copied: dict[tuple[object, ...], torch.Tensor] = {}
        for name, tensor in tensors.items():
            identity = memory_of(tensor)
            twin = copied.get(identity)
            if twin is not None:
                self._copies[name] = twin
                continue
            if name not in self._copies:
                dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
                self._copies[name] = torch.empty(tensor.shape, dtype=dtype)
            copied[identity] = self._copies[name].copy_(tensor.detach())
        return self._copies
