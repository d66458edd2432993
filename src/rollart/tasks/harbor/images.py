"""Which root file system stands for the image that a Dockerfile begins with.

`python:…` and `debian:…` are the machine itself (the base `host`) if it has that version of Python or Debian, and
folders that the user names otherwise, by patterns, the first that fits: `roots = {"python:3.12*": "roots/python-312"}`.
"""

import fnmatch
import platform
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rollart.types.errors import RequestError
from rollart.types.sandboxes import HOST_BASE

PYTHONS = ("/usr/local/bin/python3", "/usr/bin/python3")
"""Where commands of a sandbox find Python, in this order."""
RELEASES = {"11": "bullseye", "12": "bookworm", "13": "trixie", "14": "forky"}
ROOTS = "name a folder with its root file system in environment_settings.roots (docs/harbor.md)"


class Base(NamedTuple):
    """`folder`: of a `SandboxSpec`. `python`: the image has a program of that name, which the root may not."""

    folder: str
    python: bool


def base_of(image: str, roots: Mapping[str, str]) -> Base:
    """The root of an image, or `RequestError`."""
    plain = image.partition("@")[0].removeprefix("docker.io/").removeprefix("library/")
    name, _, tag = plain.partition(":")
    is_python = name == "python"
    for pattern, folder in roots.items():
        if fnmatch.fnmatchcase(plain, pattern) or fnmatch.fnmatchcase(image, pattern):
            if not Path(folder).is_dir():
                raise RequestError(f"environment_settings.roots: {folder}, for {pattern}, is no folder")
            return Base(str(Path(folder).absolute()), is_python)
    if is_python:
        _check_python(image, tag)
    elif name == "debian":
        _check_debian(image, tag)
    else:
        raise RequestError(f"FROM {image}: only python and debian are known; {ROOTS}")
    return Base(HOST_BASE, is_python)


def _check_python(image: str, tag: str) -> None:
    found = re.match(r"(3(?:\.\d+)*)(?=-|$)", tag)
    wanted = found[1] if found else ""
    if tag and not wanted and tag not in ("slim", "latest"):
        raise RequestError(f"FROM {image}: it is not clear which Python that is; {ROOTS}")
    here = host_python()
    if not here:
        raise RequestError(f"FROM {image}: this machine has no {PYTHONS[1]}; install it, or {ROOTS}")
    if wanted and here.split(".")[: min(2, wanted.count(".") + 1)] != wanted.split(".")[:2]:
        raise RequestError(f"FROM {image}: this machine has Python {here}; {ROOTS}")


def _check_debian(image: str, tag: str) -> None:
    release = debian_release()
    if not release:
        raise RequestError(f"FROM {image}: this machine is no Debian; {ROOTS}")
    wanted = tag.removesuffix("-slim").partition(".")[0].partition("-")[0]
    if wanted not in ("", "stable", "latest", "slim", release, RELEASES.get(release, release)):
        raise RequestError(f"FROM {image}: this machine has Debian {release}; {ROOTS}")


@cache
def host_python() -> str:
    """Version of the Python that the base `host` has; empty if there is none."""
    for place in PYTHONS:
        if Path(place).exists():
            code = "import platform; print(platform.python_version())"
            ran = subprocess.run([place, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
            return ran.stdout.strip()
    return ""


@cache
def debian_release() -> str:
    """The number of this machine's Debian; empty if it is none."""
    try:
        about = platform.freedesktop_os_release()
    except OSError:
        return ""
    return about.get("VERSION_ID", "") if about.get("ID") == "debian" else ""
