"""Conformance of places for the folders of a run (`RunFiles`)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollart.conformance.case import Case, ConformanceError, NotApplicable, Suite, check
from rollart.ports.files import RunFiles
from rollart.ports.folder_transfer import PIECE_BYTES, entries_of
from rollart.types.errors import FilesError, FolderMissing

SUITE = Suite["FilesHarness", None]()


@dataclass(kw_only=True)
class FilesHarness:
    """One empty place."""

    files: RunFiles
    scratch: Path
    """Empty folder of this machine."""
    leave_half: Callable[[Path, str], None] | None = None
    """Send a folder (source, name) as by a process that is killed halfway."""
    corrupt: Callable[[str, str], None] | None = None
    """Flip a byte of a file (folder, name) at the place."""
    reopen: Callable[[], RunFiles] | None = None
    """The same place as seen by another process."""
    neighbours: Callable[[], list[str]] | None = None
    """Names of all that lies beside the place, which must not change."""


@SUITE.case
def a_new_place_is_empty(harness: FilesHarness) -> None:
    """There is no folder before the first `put`, and none can be read."""
    check(harness.files.folders() == [], f"nothing was put, but there is {harness.files.folders()}")
    with raises(FolderMissing, "an unknown folder is missing"):
        harness.files.contents("unknown")
    with raises(FolderMissing, "an unknown folder is missing"):
        harness.files.get("unknown", harness.scratch / "copy")
    harness.files.delete("unknown")
    harness.files.discard_drafts()


@SUITE.case
def folders_come_back_as_they_went(harness: FilesHarness) -> None:
    """Every byte, name and size: empty files, one of several pieces, and one of exactly a piece."""
    source = make(
        harness.scratch / "source",
        {
            "empty.json": b"",
            "small.json": b"{}",
            "piece.safetensors": bytes(PIECE_BYTES),
            "big.safetensors": bytes(range(256)) * (PIECE_BYTES // 100),
        },
    )
    harness.files.put(source, "step-1")
    for number, files in enumerate(readers(harness)):
        check(files.folders() == ["step-1"], f"one folder was put, but there is {files.folders()}")
        check(files.contents("step-1") == entries_of(source), "the contents are those of the source")
        target = harness.scratch / f"copy-{number}"
        files.get("step-1", target)
        check(entries_of(target) == entries_of(source), "the copy has the contents of the source")
        beside = {path.name for path in harness.scratch.iterdir()}
        check(not [name for name in beside if name.endswith(".tmp")], f"drafts are left behind: {beside}")


@SUITE.case
def a_repeated_put_has_no_effect(harness: FilesHarness) -> None:
    """The same contents again, as after a lost answer, are stored once; other contents are refused."""
    source = make(harness.scratch / "source", {"a.json": b"one"})
    other = make(harness.scratch / "other", {"a.json": b"two"})
    harness.files.put(source, "step-1")
    harness.files.put(source, "step-1")
    with raises(FilesError, "other contents do not replace a folder"):
        harness.files.put(other, "step-1")
    check(harness.files.contents("step-1") == entries_of(source), "the first contents stay")


@SUITE.case
def a_deleted_folder_is_gone(harness: FilesHarness) -> None:
    """`delete` removes one folder and no other; its name can be used again."""
    source = make(harness.scratch / "source", {"a.json": b"one"})
    other = make(harness.scratch / "other", {"a.json": b"two"})
    harness.files.put(source, "step-1")
    harness.files.put(source, "step-2")
    harness.files.delete("step-1")
    for files in readers(harness):
        check(files.folders() == ["step-2"], f"step-2 is left, but there is {files.folders()}")
    harness.files.put(other, "step-1")
    check(harness.files.contents("step-1") == entries_of(other), "the name has the new contents")


@SUITE.case
def half_a_folder_is_never_seen(harness: FilesHarness) -> None:
    """A transfer that was cut leaves a draft: not listed, not read, and no obstacle to the next `put`."""
    if harness.leave_half is None:
        raise NotApplicable
    source = make(harness.scratch / "source", {"a.json": b"one", "b.json": b"two"})
    harness.files.put(source, "step-1")
    harness.leave_half(source, "step-2")
    for files in readers(harness):
        check(files.folders() == ["step-1"], f"step-2 is half there, but the folders are {files.folders()}")
        with raises(FolderMissing, "half a folder is missing"):
            files.get("step-2", harness.scratch / "copy")
    harness.files.put(source, "step-2")
    check(harness.files.contents("step-2") == entries_of(source), "a later transfer is complete")
    harness.leave_half(source, "step-3")
    harness.files.discard_drafts()
    check(harness.files.folders() == ["step-1", "step-2"], "discarding drafts leaves complete folders alone")


@SUITE.case
def a_flipped_byte_is_not_copied(harness: FilesHarness) -> None:
    """What was damaged at the place is refused, or has a digest that differs from the one that was put."""
    if harness.corrupt is None:
        raise NotApplicable
    source = make(harness.scratch / "source", {"a.json": b"one"})
    harness.files.put(source, "step-1")
    harness.corrupt("step-1", "a.json")
    target = harness.scratch / "copy"
    try:
        harness.files.get("step-1", target)
    except FilesError:
        check(not target.exists(), "a refused copy is not there")
    else:
        check(harness.files.contents("step-1") != entries_of(source), "the damage shows in the digests")


@SUITE.case
def an_existing_target_is_kept(harness: FilesHarness) -> None:
    """`get` makes a new folder; one that is there is not overwritten."""
    source = make(harness.scratch / "source", {"a.json": b"one"})
    target = make(harness.scratch / "target", {"b.json": b"own"})
    harness.files.put(source, "step-1")
    with raises(FilesError, "an existing target is refused"):
        harness.files.get("step-1", target)
    check([path.name for path in target.iterdir()] == ["b.json"], "the target is as it was")


@SUITE.case
def nothing_outside_the_place_is_reached(harness: FilesHarness) -> None:
    """Paths, hidden names and empty names are refused by every method."""
    source = make(harness.scratch / "source", {"a.json": b"one"})
    before = None if harness.neighbours is None else harness.neighbours()
    for name in ("..", "../beside", "a/b", "/etc", "", ".hidden", "a\0b"):
        for attempt in (
            lambda name=name: harness.files.put(source, name),
            lambda name=name: harness.files.get(name, harness.scratch / "copy"),
            lambda name=name: harness.files.contents(name),
            lambda name=name: harness.files.delete(name),
        ):
            with raises(FilesError, f"{name!r} is refused"):
                attempt()
    if harness.neighbours is not None:
        check(harness.neighbours() == before, "nothing beside the place changed")


def make(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def readers(harness: FilesHarness) -> list[RunFiles]:
    return [harness.files] + ([harness.reopen()] if harness.reopen is not None else [])


@contextmanager
def raises(kind: type[Exception], promise: str) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise ConformanceError(f"{promise}: {kind.__name__} was not raised")


CASES: tuple[Case[FilesHarness, None], ...] = SUITE.cases()
