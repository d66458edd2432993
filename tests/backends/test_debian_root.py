"""Root file systems from Debian packages, made for real and used as bases of sandboxes."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import sandbox_parts

from rollart.backends.sandboxes import debian
from rollart.backends.sandboxes.debian import make_root
from rollart.types.errors import RequestError
from rollart.types.sandboxes import SandboxSpec


@pytest.fixture
def folder() -> Iterator[Path]:
    if shutil.which("apt-get") is None or not list(Path("/var/lib/apt/lists").glob("*Packages*")):
        pytest.skip("apt-get, or its list of packages (apt-get update), is not here")
    with sandbox_parts.public_folder() as made:
        yield made


@pytest.mark.long
def test_a_root_has_its_packages_and_belongs_to_the_sandbox(folder: Path) -> None:
    count = make_root(["python3", "git"], folder / "root")
    assert [path.name for path in folder.iterdir()] == ["root"]
    script = (
        "set -e; id -u; python3 -c 'import json, ssl, sqlite3'; git --version | cut -c1-3; "
        "echo a b | awk '{print $2}'; touch /usr/bin/own; "
        "grep -c '^Package' /var/lib/dpkg/status; getent passwd agent | cut -d: -f3"
    )
    with sandbox_parts.own_sandboxes(folder / "sandboxes") as sandboxes:
        for root, user in ((True, "0"), (False, "1000")):
            sandbox = sandboxes.create(SandboxSpec(base=str(folder / "root"), root=root))
            ran = sandbox.exec(["bash", "-c", script])
            assert ran.ok, ran.stderr
            assert ran.stdout.decode().split() == [user, "git", "b", str(count), "1000"]
    assert not (folder / "root/usr/bin/own").exists()


@pytest.mark.long
def test_what_is_no_package_is_named_and_leaves_nothing(folder: Path) -> None:
    with pytest.raises(RequestError, match="Unable to locate package no-such-package"):
        make_root(["no-such-package"], folder / "root")
    assert list(folder.iterdir()) == []


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="exists; give the path of a new folder"):
        make_root([], tmp_path)


def test_other_systems_are_told_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "TOOLS", ("no-apt-get",))
    with pytest.raises(RequestError, match="no-apt-get, which is not installed here"):
        make_root([], tmp_path / "root")
    assert list(tmp_path.iterdir()) == []
