"""Rules shared by all weight stores, so that they decide alike and with the same messages."""

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from rollart.types.digests import record_digest
from rollart.types.errors import VersionMissing, WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest, verify_chunks

PIECE_BYTES = 2**20


def checked_buckets(manifest: Manifest, buckets: Iterable[bytes | memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Buckets with their indices, one at a time; raises `WeightError` if number or sizes differ from the manifest."""
    version, count = manifest.version, len(manifest.digests)
    if count != len(manifest.bucket_bytes):
        raise WeightError(
            f"{version} has {count} digests and {len(manifest.bucket_bytes)} sizes; they must be as many. "
            "Nothing was published."
        )
    given = 0
    for index, bucket in enumerate(buckets):
        view = memoryview(bucket).cast("B")
        if index >= count or view.nbytes != manifest.bucket_bytes[index]:
            says = f"{manifest.bucket_bytes[index]} bytes" if index < count else f"{count} buckets"
            raise WeightError(
                f"bucket {index} of {version} has {view.nbytes} bytes, but its manifest says {says}. "
                "Nothing was published."
            )
        yield index, view
        given += 1
    if given != count:
        raise WeightError(f"{version} has {given} buckets, but its manifest says {count}. Nothing was published.")


def copy_bucket(manifest: Manifest, index: int, data: bytes | memoryview, place: memoryview) -> None:
    """Copy a bucket to its place and verify it there, piece by piece while a piece is in the processor's cache."""
    source = memoryview(data).cast("B")

    def copied() -> Iterator[memoryview]:
        for start in range(0, len(source), PIECE_BYTES):
            piece = place[start : start + PIECE_BYTES]
            piece[:] = source[start : start + PIECE_BYTES]
            yield piece

    verify_chunks(manifest, index, copied())


def check_newer(version: Version, fence: Version | None) -> None:
    """Raise `WeightError` unless the version is newer than every version ever published."""
    if fence is not None and version <= fence:
        raise WeightError(
            f"{version} is not newer than {fence}, the newest version published. "
            "Versions only grow; a restarted trainer publishes under a new epoch."
        )


Dependencies = Mapping[Version, Version | None]
"""Versions held by a store, and the dependency of each (`Manifest.depends_on`)."""


def check_dependency(manifest: Manifest, held: Collection[Version]) -> None:
    """Raise `VersionMissing` unless the version's dependency is held."""
    needed = manifest.depends_on
    if needed is not None and needed not in held:
        there = ", ".join(map(str, sorted(held))) or "nothing"
        raise VersionMissing(
            f"{manifest.version} is of kind {manifest.kind.value} on {needed}, which the store does not hold; it holds "
            f"{there}. Nothing was published; publish a full version first."
        )


def check_not_needed(version: Version, held: Dependencies) -> None:
    """Raise `WeightError` if a held version depends on this one."""
    dependents = [other for other, needed in held.items() if needed == version]
    if dependents:
        raise WeightError(f"{version} cannot be dropped: {min(dependents)} depends on it; drop that first")


def with_dependencies(versions: Iterable[Version], held: Dependencies) -> set[Version]:
    """These versions and all their dependencies, direct or indirect.

    >>> full, adapter, other = Version(0, 0), Version(0, 1), Version(0, 2)
    >>> sorted(with_dependencies([adapter], {full: None, adapter: full, other: full})) == [full, adapter]
    True
    """
    found: set[Version] = set()
    for version in versions:
        needed: Version | None = version
        while needed is not None and needed not in found:
            found.add(needed)
            needed = held.get(needed)
    return found


def with_dependents(version: Version, held: Dependencies) -> set[Version]:
    """This version and all its dependents, direct or indirect: what is removed with it."""
    return {other for other in held if version in with_dependencies([other], held)} | {version}


def check_index(manifest: Manifest, index: int) -> None:
    if not 0 <= index < len(manifest.digests):
        raise VersionMissing(f"{manifest.version} has no bucket {index}, only {len(manifest.digests)} of them")


def not_held(version: Version, held: Iterable[Version]) -> VersionMissing:
    there = ", ".join(map(str, sorted(held))) or "nothing"
    return VersionMissing(f"{version} is not in the store, which holds {there}; publish or stage another")


def sealed(manifest: Manifest) -> tuple[bytes, str]:
    """A manifest as JSON, and its digest, by which a reader in another process verifies it."""
    data = msgspec.json.encode(manifest)
    return data, record_digest(data)
