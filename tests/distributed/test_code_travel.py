"""The user's code on other nodes: what travels, and what must not."""

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from rollart.distributed.code_travel import EXCLUDED, Code, check_size, excluded, own_code
from rollart.types.errors import RequestError


def package(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    return folder / name


def test_the_working_directory_travels_with_its_part_of_the_import_path(tmp_path: Path) -> None:
    code = own_code(tmp_path, "", (str(tmp_path), str(tmp_path / "lib")))
    assert code == Code(tmp_path, (".", "lib"), ())


def test_a_script_elsewhere_takes_its_own_folder_along(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert own_code(here, str(there / "train.py"), (str(there),)) == Code(there, (".",), ())
    assert own_code(here, str(here / "scripts" / "train.py"), ()) == Code(here, (), ())


def test_packages_of_the_import_path_outside_travel_one_by_one(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    mine = package(outside, "mine")
    package(outside, "rollart")
    (outside / "single.py").touch()
    (outside / "notes.txt").touch()
    (outside / "data").mkdir()
    code = own_code(tmp_path / "project", "", (str(outside), str(tmp_path / "missing")))
    assert code.modules == (str(mine), str(outside / "single.py"))
    assert code.import_path == ()


def test_a_package_never_contains_the_folder_that_ray_packs_it_in(tmp_path: Path) -> None:
    """It would grow until the disk is full."""
    assert "/scratch/" in excluded(tmp_path, tmp_path / "scratch")
    assert excluded(tmp_path, Path("/elsewhere")) == EXCLUDED
    for folder in (tmp_path, Path("/")):
        with pytest.raises(RequestError, match="start from the folder of your project"):
            excluded(folder, tmp_path)


def test_the_size_counts_only_what_travels(tmp_path: Path) -> None:
    for name in ("runs/a.bin", "session_2026/b.bin", "ignored/c.bin", "weights.safetensors", "code.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1000))
    (tmp_path / ".gitignore").write_text("ignored/\n")
    check_size(tmp_path, EXCLUDED, limit_bytes=1100)
    with pytest.raises(RequestError, match=r"most of it in code\.py"):
        check_size(tmp_path, EXCLUDED, limit_bytes=900)
