"""Index of a shared-memory store: which version is in which slot, and which slot the next version takes."""

from collections.abc import Container

import msgspec

from rollart.ports.weight_rules import Dependencies, with_dependencies, with_dependents
from rollart.types.versions import Version


class Held(msgspec.Struct, frozen=True):
    """A version in a slot."""

    version: Version
    slot: int
    manifest_bytes: int
    manifest_digest: str
    depends_on: Version | None = None


class Index(msgspec.Struct, frozen=True):
    """The commit record. `fence` is the newest version ever published."""

    slot_bytes: tuple[int, ...]
    """The size of each slot."""
    fence: Version | None = None
    held: tuple[Held, ...] = ()
    ordered: bool = True
    """Whether versions only grow; a copy of another store takes them in any order."""

    def of(self, version: Version) -> Held | None:
        return next((held for held in self.held if held.version == version), None)

    def dependencies(self) -> Dependencies:
        return {held.version: held.depends_on for held in self.held}

    def without(self, versions: Container[Version]) -> "Index":
        return msgspec.structs.replace(self, held=tuple(held for held in self.held if held.version not in versions))

    def with_version(self, held: Held) -> "Index":
        fence = held.version if self.ordered else None
        return msgspec.structs.replace(self, fence=fence, held=(*self.held, held))

    def candidates(self, nbytes: int, needed: Version | None) -> list[tuple[int, set[Version]]]:
        """Slots for a version of `nbytes` that depends on `needed`, best first, each with the versions evicted."""
        dependencies = self.dependencies()
        newest = max(dependencies, default=None)
        protected = with_dependencies([version for version in (newest, needed) if version is not None], dependencies)
        taken = {held.slot: held.version for held in self.held}
        evicted = {
            slot: with_dependents(taken[slot], dependencies) if slot in taken else set()
            for slot, size in enumerate(self.slot_bytes)
            if size >= nbytes
        }

        def cost(slot: int) -> tuple[int, int, Version, int]:
            # A free slot evicts nothing, a version without dependents only itself.
            return self.slot_bytes[slot], min(len(evicted[slot]), 2), taken.get(slot, Version(0, 0)), slot

        return [(slot, evicted[slot]) for slot in sorted(evicted, key=cost) if not evicted[slot] & protected]
