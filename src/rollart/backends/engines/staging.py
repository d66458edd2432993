"""Weight versions beside the one in service: fetched one bucket per slice, so that generation goes on between them.

What holds: a version is ready only when every bucket has the digest of its manifest and its tensors are exactly those
of the model. Whatever fails on the way costs that version, never the one in service.
"""

from collections.abc import Mapping

import torch

from rollart.backends.stores.tensors import unpack, verify_fit
from rollart.ports.weights import WeightStore
from rollart.types.errors import WeightError
from rollart.types.messages import Staged, StageFailed
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind, verify_bucket


class Staging:
    """The versions of one engine that are being fetched or are ready."""

    def __init__(self, store: WeightStore, wanted: Mapping[str, torch.Tensor]) -> None:
        self._store = store
        self._wanted = wanted
        self._fetching: dict[Version, tuple[Manifest, list[bytes | memoryview]]] = {}
        self._ready: dict[Version, dict[str, torch.Tensor]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._fetching)

    def begin(self, manifest: Manifest) -> Staged | None:
        """Start to fetch; a version that is ready is said to be so again, one under way is left alone."""
        version = manifest.version
        if version in self._ready:
            return Staged(version)
        self._fetching.setdefault(version, (manifest, []))
        return None

    def slice(self) -> Staged | StageFailed | None:
        """Fetch and verify one bucket; says so when a version got ready or failed."""
        version, (manifest, buckets) = next(iter(self._fetching.items()))
        try:
            if manifest.kind is not WeightKind.FULL:
                raise WeightError(f"{version} is a version of kind {manifest.kind.value}; this engine takes full ones")
            if len(buckets) < len(manifest.digests):
                data = self._store.bucket(version, len(buckets))
                verify_bucket(manifest, len(buckets), data)
                buckets.append(data)
            if len(buckets) < len(manifest.digests):
                return None
            tensors = unpack(manifest, buckets)
            verify_fit(tensors, self._wanted, version)
        except Exception as error:  # noqa: BLE001 - the store may be anybody's: what it raises fails this version only
            del self._fetching[version]
            return StageFailed(version, f"{type(error).__name__}: {error}")
        del self._fetching[version]
        self._ready[version] = tensors
        return Staged(version)

    def take(self, version: Version) -> dict[str, torch.Tensor] | None:
        """The tensors of a ready version, None if it is not ready. Older ones are forgotten with it."""
        tensors = self._ready.get(version)
        if tensors is not None:
            self._ready = {other: kept for other, kept in self._ready.items() if other > version}
            self._fetching = {other: kept for other, kept in self._fetching.items() if other > version}
        return tensors
