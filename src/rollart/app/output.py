"""Output files of commands."""

from pathlib import Path

from rollart.types.errors import RequestError


def check_target(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before doing the work."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise RequestError(f"{option} {path}: is a folder, or its folder does not exist; give the path of a file")
