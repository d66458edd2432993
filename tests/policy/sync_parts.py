"""Books of a weight sync in a given state."""

from rollart.policy.sync import SyncBook
from rollart.types.ids import WorkerId
from rollart.types.messages import Stage
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind

V0, V1, V2, V3 = (Version(0, step) for step in range(4))
A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def manifest(version: Version) -> Manifest:
    return Manifest(version, None, WeightKind.FULL, (), (8,), ("digest",))


def stage(version: Version) -> Stage:
    return Stage(manifest(version))


def serving(*engines: WorkerId, version: Version = V0, rolling: bool = False) -> SyncBook:
    """A book whose engines serve `version`, which is the newest."""
    book = SyncBook(rolling=rolling)
    for engine in engines:
        assert book.engine_joined(engine) == []
    book.published(manifest(version))
    for engine in engines:
        book.staged(engine, version)
        book.updated(engine, version)
    return book


def all_staged(*engines: WorkerId, rolling: bool = False) -> SyncBook:
    """A book whose engines serve V0 and have staged V1."""
    book = serving(*engines, rolling=rolling)
    book.published(manifest(V1))
    for engine in engines:
        book.staged(engine, V1)
    return book
