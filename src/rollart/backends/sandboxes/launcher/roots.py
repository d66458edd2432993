"""The root file system of a sandbox: a read-only base under a writable layer of limited size.

    <folder>/layer   tmpfs of `disk_mb`: upper/ and work/ of the overlay, shm/ for /dev/shm
    <folder>/root    the overlay, which is what the sandbox sees as /

The limit of disk and of files is that of the tmpfs, so it is exact, and removing a layer is one unmount. A base is a
folder, or `host`: then the lower layer is a skeleton of a few files, with /usr of the machine mounted read-only.
Where overlays cannot be mounted, the base is copied into a tmpfs.
"""

import os
import shutil
import stat
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollart.backends.sandboxes.launcher.syscalls import MS_NODEV, MS_NOSUID, mount, unmount
from rollart.backends.sandboxes.launcher.transfer import check_tree

MB = 2**20
HOST = "host"
USER_ID, USER_NAME = 1000, "agent"
COPY_S = 600.0

LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Links at the top level of a machine with a merged /usr."""
ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "ssl/certs",
    "ca-certificates.conf",
    "localtime",
    "mime.types",
)
"""Public files of the machine that programs in /usr need."""
FOLDERS = {
    "usr": 0o755,
    "proc": 0o755,
    "dev": 0o755,
    "etc": 0o755,
    "run": 0o755,
    "root": 0o700,
    "home": 0o755,
    f"home/{USER_NAME}": 0o755,
    "tmp": 0o1777,
    "var": 0o755,
    "var/tmp": 0o1777,
}
FILES = {
    "etc/passwd": f"root:x:0:0:root:/root:/bin/bash\n{USER_NAME}:x:{USER_ID}:{USER_ID}::/home/{USER_NAME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": f"root:x:0:\n{USER_NAME}:x:{USER_ID}:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/hostname": "sandbox\n",
}


def make_skeleton(folder: Path, owner: int) -> None:
    """Lower layer of the base `host`. What the user of a sandbox should own belongs to `owner`."""
    for name, mode in FOLDERS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name).chmod(mode)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name in LINKS:
        if Path("/", name).is_symlink() and not (folder / name).is_symlink():
            (folder / name).symlink_to(f"usr/{name}")
    for name in ETC:
        source, target = Path("/etc", name), folder / "etc" / name
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError, shutil.Error):  # what this user may not read, sandboxes do without
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True)
            elif source.exists():
                shutil.copyfile(source, target)
    for name in ("home/" + USER_NAME, "root"):
        os.chown(folder / name, owner, owner)


def host_is_usable() -> str:
    """Why /usr of this machine is no base; empty if it is one."""
    if all(Path("/", name).is_symlink() or not Path("/", name).exists() for name in LINKS):
        return ""
    return "this machine has /bin or /lib apart from /usr; give a folder as the base"


def overlay_options(lowers: list[str], upper: str, work: str, *, rootless: bool) -> str:
    """
    >>> overlay_options(["/snap:1", "/base"], "/u", "/w", rootless=True)
    'lowerdir=/snap\\\\:1:/base,upperdir=/u,workdir=/w,userxattr'
    """
    lower = ":".join(path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,") for path in lowers)
    return f"lowerdir={lower},upperdir={upper},workdir={work}" + (",userxattr" if rootless else "")


class Root:
    """Root of one sandbox below a folder of its own; `remove` undoes it, at any point of making it."""

    def __init__(self, folder: Path, owner: int, *, rootless: bool, overlays: bool) -> None:
        self._layer, self._root = folder / "layer", folder / "root"
        self._folder, self._owner = folder, owner
        self._rootless, self._overlays = rootless, overlays

    @property
    def path(self) -> Path:
        return self._root

    @property
    def shared_memory(self) -> Path:
        return self._layer / "shm"

    def make(self, lowers: list[str], limits: dict[str, Any]) -> None:
        """Mount; `lowers` has the newest layer first."""
        self._folder.mkdir(mode=0o711)
        self._layer.mkdir()
        self._root.mkdir()
        size_mb, files = limits["disk_mb"], limits["files"]
        if not self._overlays:
            # The limit is for what is written, so the copy comes on top.
            used_mb, used_files = _size_of(lowers)
            size_mb, files = size_mb + used_mb, files + used_files
        mount(
            "tmpfs", str(self._layer), "tmpfs", MS_NOSUID | MS_NODEV, f"size={size_mb}m,nr_inodes={files + 8},mode=711"
        )
        upper, work = self._layer / "upper", self._layer / "work"
        for folder in (upper, work, self.shared_memory):
            folder.mkdir()
        self.shared_memory.chmod(0o1777)
        if self._overlays:
            options = overlay_options(lowers, str(upper), str(work), rootless=self._rootless)
            os.chown(upper, self._owner, self._owner)
            mount("overlay", str(self._root), "overlay", MS_NOSUID | MS_NODEV, options)
        else:
            self._root.rmdir()
            self._root.symlink_to("layer/upper")
            for lower in reversed(lowers):
                copy(Path(lower), upper)
            os.chown(upper, self._owner, self._owner)

    def keep(self, target: Path) -> None:
        """Copy what was written to a folder that can be a lower layer."""
        check_tree(str(self._layer / "upper"))
        copy(self._layer / "upper", target)

    def full(self) -> bool:
        """Whether there is no room for another block or file."""
        try:
            state = os.statvfs(self._layer)
        except OSError:
            return False
        return state.f_bavail == 0 or state.f_favail == 0


def remove(folder: Path) -> bool:
    """Unmount all below a folder and delete it; False if something stays mounted, and then nothing is deleted."""
    for target in reversed(mounts_below(folder)):
        with suppress(OSError):
            unmount(target)
    if mounts_below(folder):
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def mounts_below(folder: Path) -> list[str]:
    """Mount points of this mount namespace, in order of mounting."""
    with open("/proc/self/mountinfo") as table:
        points = [line.split()[4].encode().decode("unicode_escape") for line in table]
    return [point for point in points if point.startswith(f"{folder}/")]


def _size_of(folders: list[str]) -> tuple[int, int]:
    """MB and number of files below."""
    size = count = 0
    for folder in folders:
        for path, _, names in os.walk(folder):
            count += 1 + len(names)
            for name in names:
                entry = os.lstat(os.path.join(path, name))
                size += -(-entry.st_size // 4096) * 4096 if stat.S_ISREG(entry.st_mode) else 0
    return -(-size // MB) + 1, count


def copy(source: Path, target: Path) -> None:
    """Everything in a folder, with owners, extended attributes and the marks of overlays."""
    target.mkdir(exist_ok=True)
    command = ["cp", "-a", "--reflink=auto", f"{source}/.", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COPY_S, check=False)
    if done.returncode != 0:
        raise OSError(f"copying {source} failed: {done.stderr.strip()[-300:]}")
