"""A version that the ranks of a trainer publish together, each its own rows of every tensor.

    every rank:  a copy of its rows ──► layout and digests ──(exchanged)──► one manifest
    rank 0:      begin ──► its buckets ──────────────────────► commit, once all buckets are there
    others:                their buckets, in a thread ──┘

Invariants: no rank holds more of a version than its share and a bucket; a rank that cannot write its buckets ends the
publication, so that rank 0 does not wait for them.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress

import torch

from rollart.backends.stores.tensors import Packed, joined
from rollart.backends.trainers.sharding import of_each_rank
from rollart.ports.weights import ShardedWeightStore
from rollart.types.errors import WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind

logger = logging.getLogger(__name__)

OTHERS_S = 600.0
"""How long rank 0 waits for the buckets of the others."""


class ShardedDraft:
    """This rank's part of a version. Making it is collective; afterwards no rank waits for another but for rank 0."""

    def __init__(
        self,
        version: Version,
        parent: Version | None,
        kind: WeightKind,
        tensors: Mapping[str, torch.Tensor],
        bucket_bytes: int,
        *,
        store: ShardedWeightStore,
        rank: int,
        ranks: int,
    ) -> None:
        self._packed = Packed(tensors, bucket_bytes)
        self._store = store
        parts = of_each_rank(self._packed.shards(), ranks)
        self._first = sum(len(part.bucket_bytes) for part in parts[:rank])
        self.manifest = joined(parts, version, parent, kind)

    def begin(self) -> None:
        """Open the version for the buckets of all ranks; by rank 0, before any rank writes."""
        self._store.begin(self.manifest)

    def write(self, store: object) -> Manifest:  # noqa: ARG002 - it has it
        """Write the buckets of rank 0 and publish the version."""
        version = self.manifest.version
        try:
            self._put()
            self._store.commit(version, OTHERS_S)
        except BaseException:
            self._abort()
            raise
        return self.manifest

    def send(self) -> None:
        """Write the buckets of another rank. Never raises: rank 0 reports the failure."""
        try:
            self._put()
        except WeightError:
            logger.exception("the shards of %s were not written", self.manifest.version)
            self._abort()

    def _put(self) -> None:
        for index, bucket in enumerate(self._packed, self._first):
            self._store.put(self.manifest.version, index, bucket)

    def _abort(self) -> None:
        with suppress(WeightError):
            self._store.abort(self.manifest.version)
