"""Places for the folders of a run: a folder, an fsspec URL (memory, files), the controller's machine through Ray."""

import pickle
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from harnesses.common import flipped
from rollart.conformance.files import FilesHarness
from rollart.distributed.folder_files import FolderFiles
from rollart.distributed.fsspec_files import LIST, FsspecFiles
from rollart.ports.folder_transfer import pieces
from rollart.types.digests import bulk_digest


def _spread(scratch: Path) -> tuple[Path, Path]:
    """The place, below a run folder with neighbours, and the scratch folder of the cases."""
    run = scratch / "run"
    run.mkdir()
    (run / "journal.sqlite").write_bytes(b"journal")
    (scratch / "mine").mkdir()
    return run / "checkpoints", scratch / "mine"


def _corrupt(place: Path) -> Callable[[str, str], None]:
    def corrupt(folder: str, name: str) -> None:
        path = place / folder / name
        path.write_bytes(flipped(path.read_bytes()))

    return corrupt


def folder_files(scratch: Path) -> FilesHarness:
    place, mine = _spread(scratch)
    files = FolderFiles(place)

    def leave_half(source: Path, folder: str) -> None:
        draft = files.begin(folder)
        piece = next(pieces(next(source.iterdir())))
        files.write(draft, "a.json", 0, piece, bulk_digest(piece))

    return FilesHarness(
        files=files,
        scratch=mine,
        leave_half=leave_half,
        corrupt=_corrupt(place),
        reopen=lambda: pickle.loads(pickle.dumps(files)),
        neighbours=lambda: sorted(path.name for path in place.parent.iterdir()),
    )


def url_of_files(scratch: Path) -> FilesHarness:
    place, mine = _spread(scratch)
    files = FsspecFiles(place.as_uri())

    def leave_half(source: Path, folder: str) -> None:
        (place / folder).mkdir()
        (place / folder / "a.json").write_bytes(next(source.iterdir()).read_bytes())
        (place / folder / LIST).write_bytes(b'[["a.json",')

    return FilesHarness(
        files=files,
        scratch=mine,
        leave_half=leave_half,
        corrupt=_corrupt(place),
        reopen=lambda: pickle.loads(pickle.dumps(files)),
    )


def url_of_memory(scratch: Path) -> FilesHarness:
    import fsspec

    memory, root = fsspec.filesystem("memory"), f"/{uuid4()}"
    files = FsspecFiles(f"memory:/{root}")

    def leave_half(source: Path, folder: str) -> None:
        memory.pipe_file(f"{root}/{folder}/a.json", next(source.iterdir()).read_bytes())

    def corrupt(folder: str, name: str) -> None:
        memory.pipe_file(f"{root}/{folder}/{name}", flipped(memory.cat_file(f"{root}/{folder}/{name}")))

    return FilesHarness(
        files=files,
        scratch=scratch,
        leave_half=leave_half,
        corrupt=corrupt,
        reopen=lambda: pickle.loads(pickle.dumps(files)),
    )


def ray_files(scratch: Path) -> FilesHarness:
    """Needs the fixture `local_ray`. The actor's process ends with that Ray."""
    from rollart.distributed.ray_files import ControllerFiles  # late: where Ray is missing, the rest is still tested

    place, mine = _spread(scratch)
    served = ControllerFiles(place.parent, checkpoints=place, logs=place.parent / "logs")
    files = served.checkpoints

    # Uses `served`, whose actor would otherwise end with this function.
    def leave_half(source: Path, folder: str) -> None:
        files = served.checkpoints
        draft = files._call("begin", folder)
        piece = next(pieces(next(source.iterdir())))
        files._call("write", draft, "a.json", 0, piece, bulk_digest(piece))

    return FilesHarness(
        files=files,
        scratch=mine,
        leave_half=leave_half,
        corrupt=_corrupt(place),
        reopen=lambda: pickle.loads(pickle.dumps(files)),
        neighbours=lambda: sorted(path.name for path in place.parent.iterdir()),
    )


PLACES: dict[str, Callable[[Path], FilesHarness]] = {
    "folder": folder_files,
    "file-url": url_of_files,
    "memory-url": url_of_memory,
    "ray": ray_files,
}
