"""The keeper: the init process of a sandbox, started by bubblewrap, and everything that bubblewrap is asked for."""

import json
import os
import platform
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollart.backends.sandboxes.launcher import init_program, wire
from rollart.backends.sandboxes.launcher.roots import HOST, USER_ID, Root
from rollart.backends.sandboxes.launcher.syscalls import mount

MS_BIND = 0x1000
START_S = 30.0
FLAGS, PF_EXITING = 6, 0x4
"""Position in /proc/PID/stat, after the name of the program."""
# For processors that `init_program` does not support: the same, but with programs of the sandbox.
SCRIPT = "echo ready; read -r go || exit 1; exec env --ignore-signal=CHLD sleep infinity </dev/null >/dev/null 2>&1"


class KeeperFailed(OSError):
    """Bubblewrap could not set up a sandbox."""


def mount_point(root: int, path: str, *, folder: bool, owner: int | None = None) -> None:
    """Make a path below the root (a descriptor). A link on the way is refused: it may lead to the machine's files."""
    parts = [part for part in path.split("/") if part]
    here = os.dup(root)
    try:
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            if part == "..":
                raise KeeperFailed(f"{path} may not contain ..")
            if last and not folder:
                os.close(os.open(part, os.O_CREAT | os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=here))
                return
            try:
                os.mkdir(part, 0o755, dir_fd=here)
                if last and owner is not None:
                    os.chown(part, owner, owner, dir_fd=here, follow_symlinks=False)
            except FileExistsError:
                pass
            inner = os.open(part, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = inner
    except (FileNotFoundError, NotADirectoryError) as error:
        raise KeeperFailed(f"{path} cannot be made in the sandbox: {error.strerror}; a link is on the way") from None
    finally:
        os.close(here)


class Keeper:
    """One running keeper; `child` is its process id on this machine."""

    def __init__(self, bwrap: subprocess.Popen[bytes], child: int) -> None:
        self._bwrap = bwrap
        self.child = child
        self.exited = os.pidfd_open(bwrap.pid)
        """Readable when bubblewrap, and with it the keeper, has ended."""

    @property
    def dying(self) -> bool:
        """Whether the keeper has begun to end: the kernel then kills all commands before anybody sees that it has."""
        try:
            fields = Path(f"/proc/{self.child}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return True
        return fields[0] in "ZX" or bool(int(fields[FLAGS]) & PF_EXITING)

    def kill(self) -> None:
        """Kill it and everything in the sandbox; returns when bubblewrap has ended."""
        self._bwrap.kill()
        self._bwrap.wait()
        os.close(self.exited)


def start(root: Root, folder: Path, order: dict[str, Any], owner: int | None) -> Keeper:
    """Start a sandbox over a root; `owner` is the user to become first, None to stay the same."""
    options = arguments(root, _mounts(root, folder, order, owner or 0), order)
    program = init_program.open_program() if platform.machine() in init_program.MACHINES else None
    command = ["/bin/sh", "-c", SCRIPT] if program is None else [f"/proc/self/fd/{program}", "keeper"]
    reader, writer = os.pipe()
    user = {} if owner is None else {"user": owner, "group": owner, "extra_groups": []}
    bwrap = subprocess.Popen(
        ["bwrap", "--info-fd", str(writer), *options, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(writer,) if program is None else (writer, program),
        bufsize=0,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
        **user,  # type: ignore[call-overload]
    )
    os.close(writer)
    if program is not None:
        os.close(program)
    try:
        return _ready(bwrap, reader)
    except BaseException:
        bwrap.kill()
        bwrap.wait()
        raise
    finally:
        os.close(reader)
        for stream in (bwrap.stdin, bwrap.stdout, bwrap.stderr):
            assert stream is not None
            stream.close()


def _ready(bwrap: "subprocess.Popen[bytes]", info: int) -> Keeper:
    assert bwrap.stdin is not None
    assert bwrap.stdout is not None
    assert bwrap.stderr is not None
    ready = wire.wait([bwrap.stdout.fileno()], START_S)
    if not ready or os.read(bwrap.stdout.fileno(), 64) != init_program.READY:
        bwrap.kill()
        said = bwrap.stderr.read().decode(errors="replace").strip()
        raise KeeperFailed(said or f"bubblewrap was not ready after {START_S:g} s")
    about = json.loads(os.read(info, 2**16))
    keeper = Keeper(bwrap, about["child-pid"])
    bwrap.stdin.write(b"go\n")
    return keeper


def _mounts(root: Root, folder: Path, order: dict[str, Any], owner: int) -> list[tuple[str, str, str]]:
    """(option of bubblewrap, source, path inside) of what is mounted in.

    Each is first mounted below the sandbox's folder, because bubblewrap, as another user, may not reach the original.
    """
    found = []
    top = os.open(root.path, os.O_DIRECTORY | os.O_RDONLY)
    try:
        for name in ("proc", "dev", "tmp"):
            mount_point(top, name, folder=True)
        mount_point(top, order["workdir"], folder=True, owner=owner)
        wanted = [("--bind", *pair) for pair in order["sockets"]] + [
            ("--ro-bind", *pair) for pair in order["read_only"]
        ]
        for number, (option, inside, outside) in enumerate(wanted):
            is_folder = stat.S_ISDIR(os.stat(outside).st_mode)
            mount_point(top, inside, folder=is_folder)
            here = folder / f"mount-{number}"
            here.mkdir() if is_folder else here.touch()
            mount(outside, str(here), "", MS_BIND)
            found.append((option, str(here), inside))
    finally:
        os.close(top)
    return found


def arguments(root: Root, mounts: Sequence[tuple[str, str, str]], order: dict[str, Any]) -> list[str]:
    """Options of bubblewrap, in the order in which it acts on them; the keeper's command follows."""
    user = str(0 if order["root"] else USER_ID)
    # fmt: off
    return [
        "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--unshare-cgroup-try",
        "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--clearenv",
        "--uid", user, "--gid", user, "--hostname", "sandbox",
        "--bind", str(root.path), "/",
        *(("--ro-bind", "/usr", "/usr") if order["base"] == HOST else ()),
        "--proc", "/proc",
        # Its tmpfs has no limit of size, so only /dev/shm, which is in the layer, stays writable.
        "--dev", "/dev", "--bind", str(root.shared_memory), "/dev/shm", "--remount-ro", "/dev",
        *(part for option, source, inside in mounts for part in (option, source, inside)),
        "--chdir", "/",
    ]
    # fmt: on
