"""Description of files that travel between machines."""

import msgspec

from rollart.types.digests import record_digest


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """One file of a folder."""

    name: str
    nbytes: int
    digest: str
    """Bulk digest of its content (`types.digests`)."""


Entries = tuple[FileEntry, ...]
"""All files of a folder, sorted by name."""


def folder_digest(entries: Entries) -> str:
    """Digest of a folder: equal for the same names and contents.

    >>> entries = (FileEntry("a.json", 2, "xxh3:00"),)
    >>> folder_digest(entries) == folder_digest(entries), len(folder_digest(entries))
    (True, 32)
    """
    return record_digest(msgspec.json.encode(entries))
