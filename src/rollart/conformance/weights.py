"""Conformance of weight stores."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from rollart.conformance.case import Case, ConformanceError, NotApplicable, Suite, check
from rollart.ports.weights import WeightStore
from rollart.types.errors import DigestMismatch, VersionMissing, WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest, TensorEntry, WeightKind, bucket_digest

SUITE = Suite["WeightStoreHarness", None]()


@dataclass(kw_only=True)
class WeightStoreHarness:
    """One empty store."""

    store: WeightStore
    corrupt: Callable[[Version, int], None] | None = None
    """Flip a byte of a bucket in the store's storage."""
    reopen: Callable[[], WeightStore] | None = None
    """The same store as seen by another reader, for stores shared between processes."""


@SUITE.case
def a_new_store_is_empty(harness: WeightStoreHarness) -> None:
    """`newest` is None before the first version, and there is no version to read."""
    check(harness.store.newest() is None, f"nothing was published, but the newest is {harness.store.newest()}")
    missing(harness.store, Version(0, 0))


@SUITE.case
def published_versions_are_read_back(harness: WeightStoreHarness) -> None:
    """Manifest and buckets are read as they were published, by every reader."""
    manifest, buckets = publish(harness.store, Version(0, 1))
    for store in readers(harness):
        holds(store, manifest, buckets)
        check(store.newest() == manifest.version, f"the newest is {manifest.version}, but it is {store.newest()}")


@SUITE.case
def published_bytes_are_the_stores_own(harness: WeightStoreHarness) -> None:
    """Later changes to the publisher's buffers have no effect on a published version."""
    manifest, buckets = make(Version(0, 1))
    buffers = [bytearray(bucket) for bucket in buckets]
    harness.store.publish(manifest, [memoryview(buffer) for buffer in buffers])
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    holds(harness.store, manifest, buckets)


@SUITE.case
def a_wrong_bucket_publishes_nothing(harness: WeightStoreHarness) -> None:
    """A bucket with a wrong digest raises `DigestMismatch` and publishes nothing; the correct one can follow."""
    manifest, buckets = make(Version(0, 1))
    with raises(DigestMismatch, "a bucket with a wrong digest is refused"):
        harness.store.publish(manifest, [*buckets[:-1], b"\x01" + buckets[-1][1:]])
    missing(harness.store, manifest.version)
    check(harness.store.newest() is None, "a refused version is not the newest")
    harness.store.publish(manifest, buckets)
    holds(harness.store, manifest, buckets)


@SUITE.case
def a_missing_bucket_publishes_nothing(harness: WeightStoreHarness) -> None:
    """A version is visible completely or not at all: fewer buckets than in the manifest are refused."""
    manifest, buckets = make(Version(0, 1))
    with raises(WeightError, "a version with a missing bucket is refused"):
        harness.store.publish(manifest, buckets[:-1])
    missing(harness.store, manifest.version)


@SUITE.case
def a_flipped_byte_is_never_read(harness: WeightStoreHarness) -> None:
    """Reading raises `DigestMismatch` instead of returning wrong bytes; the other buckets remain readable."""
    if harness.corrupt is None:
        raise NotApplicable("the harness cannot damage a bucket")
    manifest, buckets = publish(harness.store, Version(0, 1))
    harness.corrupt(manifest.version, 1)
    for store in readers(harness):
        with raises(DigestMismatch, "a damaged bucket is not read"):
            store.bucket(manifest.version, 1)
        check(bytes(store.bucket(manifest.version, 0)) == buckets[0], "an undamaged bucket is read as published")


@SUITE.case
def versions_only_grow(harness: WeightStoreHarness) -> None:
    """A version that is not newer than the newest raises `WeightError` and changes nothing."""
    manifest, buckets = publish(harness.store, Version(0, 5))
    for version in (Version(0, 5), Version(0, 4)):
        other, bytes_ = make(version, salt=7)
        with raises(WeightError, f"{version} is not newer than {manifest.version}"):
            harness.store.publish(other, bytes_)
    holds(harness.store, manifest, buckets)
    missing(harness.store, Version(0, 4))
    check(harness.store.newest() == manifest.version, "a refused version is not the newest")


@SUITE.case
def epochs_come_first(harness: WeightStoreHarness) -> None:
    """Versions are ordered by epoch, then step: a new epoch may start at a lower step, and fences out the old one."""
    first, _ = publish(harness.store, Version(0, 9))
    second, buckets = publish(harness.store, Version(1, 3))
    check(first.version < second.version, "versions are ordered by epoch first")
    check(harness.store.newest() == second.version, f"{second.version} is the newest, not {harness.store.newest()}")
    late, late_buckets = make(Version(0, 10))
    with raises(WeightError, "an old epoch can no longer publish"):
        harness.store.publish(late, late_buckets)
    holds(harness.store, second, buckets)


@SUITE.case
def older_versions_stay(harness: WeightStoreHarness) -> None:
    """Publishing a version leaves older ones readable until they are dropped."""
    kept = [publish(harness.store, Version(0, step)) for step in (1, 2, 3)]
    for manifest, buckets in kept:
        holds(harness.store, manifest, buckets)


@SUITE.case
def a_dropped_version_is_missing(harness: WeightStoreHarness) -> None:
    """`drop` removes one version, and is ignored for versions that do not exist."""
    first, _ = publish(harness.store, Version(0, 1))
    second, buckets = publish(harness.store, Version(0, 2))
    harness.store.drop(Version(7, 7))
    harness.store.drop(first.version)
    harness.store.drop(first.version)
    missing(harness.store, first.version)
    holds(harness.store, second, buckets)
    check(harness.store.newest() == second.version, "dropping an old version leaves the newest")


@SUITE.case
def the_newest_can_be_read(harness: WeightStoreHarness) -> None:
    """`newest` names a readable version: after the newest was dropped, the one before it, and finally none."""
    first, buckets = publish(harness.store, Version(0, 1))
    second, _ = publish(harness.store, Version(0, 2))
    harness.store.drop(second.version)
    check(
        harness.store.newest() == first.version,
        f"{second.version} was dropped, but the newest is {harness.store.newest()}",
    )
    holds(harness.store, first, buckets)
    harness.store.drop(first.version)
    check(harness.store.newest() is None, f"all versions were dropped, but the newest is {harness.store.newest()}")


@SUITE.case
def an_adapter_is_held_with_what_it_is_on(harness: WeightStoreHarness) -> None:
    """However many adapters follow on one full version: with every one that is held, that version is held."""
    base, base_buckets = publish(harness.store, Version(0, 0))
    for step in range(1, 13):
        manifest, buckets = publish_adapter(harness.store, Version(0, step), on=base.version)
        for store in readers(harness):
            holds(store, manifest, buckets)
            holds(store, base, base_buckets)


@SUITE.case
def an_adapter_moves_to_the_next_full_version(harness: WeightStoreHarness) -> None:
    """A restarted trainer publishes a full version and adapters on that one; the old ones do not interfere."""
    for epoch in range(4):
        base, base_buckets = publish(harness.store, Version(epoch, epoch))
        holds(harness.store, base, base_buckets)
        for step in range(epoch + 1, epoch + 5):
            manifest, buckets = publish_adapter(harness.store, Version(epoch, step), on=base.version)
            holds(harness.store, manifest, buckets)
            holds(harness.store, base, base_buckets)


@SUITE.case
def a_full_version_needs_no_parent(harness: WeightStoreHarness) -> None:
    """The parent of a full version is history: it may be dropped, and need not be there."""
    parent, _ = publish(harness.store, Version(0, 1))
    manifest, buckets = make(Version(0, 2))
    manifest = msgspec.structs.replace(manifest, parent=parent.version)
    harness.store.publish(manifest, buckets)
    harness.store.drop(parent.version)
    missing(harness.store, parent.version)
    holds(harness.store, manifest, buckets)
    other, other_buckets = make(Version(0, 3))
    other = msgspec.structs.replace(other, parent=parent.version)
    harness.store.publish(other, other_buckets)
    holds(harness.store, other, other_buckets)


@SUITE.case
def an_adapter_on_nothing_is_refused(harness: WeightStoreHarness) -> None:
    """An adapter whose full version is not held raises `VersionMissing` and publishes nothing."""
    first, buckets = publish(harness.store, Version(0, 1))
    with raises(VersionMissing, "an adapter on a version that is not there is refused"):
        publish_adapter(harness.store, Version(0, 3), on=Version(0, 2))
    missing(harness.store, Version(0, 3))
    holds(harness.store, first, buckets)
    check(harness.store.newest() == first.version, "a refused version is not the newest")


@SUITE.case
def what_is_needed_is_not_dropped(harness: WeightStoreHarness) -> None:
    """`drop` raises `WeightError` for a version that a held one depends on; without the adapter, it can be dropped."""
    base, base_buckets = publish(harness.store, Version(0, 1))
    adapter, buckets = publish_adapter(harness.store, Version(0, 2), on=base.version)
    with raises(WeightError, f"{base.version} is needed by {adapter.version}"):
        harness.store.drop(base.version)
    holds(harness.store, base, base_buckets)
    holds(harness.store, adapter, buckets)
    harness.store.drop(adapter.version)
    harness.store.drop(base.version)
    missing(harness.store, base.version)


@SUITE.case
def an_unknown_bucket_is_missing(harness: WeightStoreHarness) -> None:
    """A bucket index outside the manifest raises `VersionMissing`."""
    manifest, _ = publish(harness.store, Version(0, 1))
    for index in (len(manifest.digests), -1):
        with raises(VersionMissing, f"there is no bucket {index}"):
            harness.store.bucket(manifest.version, index)


def make(version: Version, *, salt: int = 0) -> tuple[Manifest, list[bytes]]:
    """A version of three buckets with distinct bytes."""
    start = version.epoch * 31 + version.step * 7 + salt
    buckets = [bytes((start + index + byte) % 256 for byte in range(64 + 16 * index)) for index in range(3)]
    tensors = tuple(
        TensorEntry(name=f"w{index}", dtype="uint8", shape=(len(data),), bucket=index, offset=0, nbytes=len(data))
        for index, data in enumerate(buckets)
    )
    manifest = Manifest(
        version=version,
        parent=None,
        kind=WeightKind.FULL,
        tensors=tensors,
        bucket_bytes=tuple(len(data) for data in buckets),
        digests=tuple(bucket_digest(data) for data in buckets),
    )
    return manifest, buckets


def publish(store: WeightStore, version: Version) -> tuple[Manifest, list[bytes]]:
    manifest, buckets = make(version)
    store.publish(manifest, buckets)
    return manifest, buckets


def publish_adapter(store: WeightStore, version: Version, *, on: Version) -> tuple[Manifest, list[bytes]]:
    manifest, buckets = make(version)
    manifest = msgspec.structs.replace(manifest, kind=WeightKind.ADAPTER, parent=on)
    store.publish(manifest, buckets)
    return manifest, buckets


def readers(harness: WeightStoreHarness) -> list[WeightStore]:
    return [harness.store] + ([harness.reopen()] if harness.reopen is not None else [])


def holds(store: WeightStore, manifest: Manifest, buckets: list[bytes]) -> None:
    """The store returns exactly this version."""
    try:
        read = store.manifest(manifest.version)
        held = [bytes(store.bucket(manifest.version, index)) for index in range(len(buckets))]
    except WeightError as error:
        raise ConformanceError(f"a published version can be read, but reading raised {error!r}") from error
    check(
        msgspec.to_builtins(read) == msgspec.to_builtins(manifest), f"the manifest is read as published, but was {read}"
    )
    for index, (got, data) in enumerate(zip(held, buckets, strict=True)):
        check(got == data, f"bucket {index} of {manifest.version} is read as published, but its bytes differ")


def missing(store: WeightStore, version: Version) -> None:
    """The store holds no part of this version."""
    with raises(VersionMissing, f"{version} is not there"):
        store.manifest(version)
    with raises(VersionMissing, f"{version} is not there"):
        store.bucket(version, 0)


@contextmanager
def raises(error: type[WeightError], promise: str) -> Iterator[None]:
    """Check that the body raises this error, as in the contract."""
    try:
        yield
    except error:
        return
    except Exception as other:
        raise ConformanceError(f"{promise}: `{error.__name__}`, but it raised {other!r}") from other
    raise ConformanceError(f"{promise}: `{error.__name__}`, but nothing was raised")


CASES: tuple[Case[WeightStoreHarness, None], ...] = SUITE.cases()
