"""Root file systems from Debian packages, as bases of sandboxes. For the release that this machine's apt knows.

    apt-get --download-only ─► packages with all they depend on ─► dpkg-deb -x ─► accounts, links, status ─► OUT

Works for root and for ordinary users: nothing is installed, no maintainer script runs, nothing is mounted. What such
scripts would have made (alternatives, certificates, compiled Python files) is missing, except what is listed in
`_finish`. Files belong to the user that sandboxes of the caller run as, so that root inside owns them.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollart.backends.sandboxes.launcher.main import sandbox_owner
from rollart.backends.sandboxes.launcher.roots import FILES, USER_ID, USER_NAME
from rollart.types.errors import RequestError

ALWAYS = (
    "base-files",
    "base-passwd",
    "bash",
    "coreutils",
    "dash",
    "debianutils",
    "diffutils",
    "findutils",
    "grep",
    "gzip",
    "hostname",
    "libc-bin",
    "login",
    "mawk",
    "sed",
    "tar",
)
"""What every root has: a shell and its usual commands."""
MERGED = ("bin", "sbin", "lib", "lib64")
FOLDERS = {"proc": 0o755, "dev": 0o755, "sys": 0o755, "run": 0o755, "tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700}
DOWNLOAD_S = 1800.0
UNPACK_S = 300.0
TOOLS = ("apt-get", "dpkg-deb")


def make_root(packages: Sequence[str], target: Path) -> int:
    """Make `target`, which must not exist, from packages and what they depend on; returns how many those are.

    It is there completely or not at all. `RequestError` if this machine is no Debian, or a package is unknown.
    """
    if target.exists():
        raise RequestError(f"{target} exists; give the path of a new folder")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise RequestError(f"roots are made of Debian packages by {missing[0]}, which is not installed here")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work:
        archives = _download(packages, Path(work))
        root = Path(work) / "root"
        _unpack(archives, root)
        _finish(archives, root)
        _give_away(root)
        root.rename(target)
    return len(archives)


def _download(packages: Sequence[str], work: Path) -> list[Path]:
    """The packages and what they depend on, as if nothing was installed."""
    archives, status = work / "archives", work / "status"
    (archives / "partial").mkdir(parents=True)
    status.touch()
    options = {
        "Dir::State::status": status,
        "Dir::Cache::archives": archives,
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "Debug::NoLocking": "1",
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "0",
    }
    settings = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    _ran(["apt-get", "install", "--download-only", "-qq", "-y", *settings, *ALWAYS, *packages], DOWNLOAD_S)
    return sorted(archives.glob("*.deb"))


def _unpack(archives: Sequence[Path], root: Path) -> None:
    root.mkdir(mode=0o755)
    for name in MERGED:
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for archive in archives:
        # Not `dpkg-deb -x`: it puts folders in place of the links above.
        command = 'dpkg-deb --fsys-tarfile "$1" | tar -xp --keep-directory-symlink --no-same-owner -C "$2"'
        _ran(["sh", "-c", command, "sh", str(archive), str(root)], UNPACK_S)


def _finish(archives: Sequence[Path], root: Path) -> None:
    """What maintainer scripts would have made and programs need."""
    for name, mode in FOLDERS.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)
    (root / "home" / USER_NAME).mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (root / name).write_text(_accounts(root, name, text), encoding="utf-8")
    for link, program in (("sh", "dash"), ("awk", "mawk")):
        place = root / "usr/bin" / link
        if not (place.exists() or place.is_symlink()):
            place.symlink_to(program)
    status = root / "var/lib/dpkg/status"
    status.parent.mkdir(parents=True, exist_ok=True)
    about = [_ran(["dpkg-deb", "-f", str(archive)], UNPACK_S).strip() for archive in archives]
    status.write_text("".join(f"{each}\nStatus: install ok installed\n\n" for each in about), encoding="utf-8")


def _accounts(root: Path, name: str, text: str) -> str:
    """Debian's own accounts and groups, with the user of sandboxes."""
    master = root / "usr/share/base-passwd" / f"{Path(name).name}.master"
    if not master.is_file():
        return text
    own = next(line for line in text.splitlines() if line.startswith(f"{USER_NAME}:x:{USER_ID}"))
    return f"{master.read_text(encoding='utf-8').replace(':*:', ':x:')}{own}\n"


def _give_away(root: Path) -> None:
    if os.geteuid() == 0:
        _ran(["chown", "-Rh", f"{sandbox_owner()}:{sandbox_owner()}", str(root)], UNPACK_S)


def _ran(command: Sequence[str], limit_s: float) -> str:
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"},
        )
    except subprocess.TimeoutExpired:
        raise RequestError(f"{command[0]} did not end within {limit_s:g} s") from None
    if ran.returncode != 0:
        said = (ran.stderr or ran.stdout).strip()[-500:]
        update = "; is the list of packages there (apt-get update)?" if command[0] == "apt-get" else ""
        raise RequestError(f"{command[0]} failed: {said}{update}")
    return ran.stdout
