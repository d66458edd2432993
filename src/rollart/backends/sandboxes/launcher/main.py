"""The launcher: one process per worker, between it and the supervisors of its sandboxes."""

import errno
import os
import platform
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollart.backends.sandboxes.launcher import leftovers, roots, seccomp, wire
from rollart.backends.sandboxes.launcher.cgroups import Group, Tree, find
from rollart.backends.sandboxes.launcher.supervisor import Machine, Supervisor
from rollart.backends.sandboxes.launcher.syscalls import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    MS_PRIVATE,
    MS_REC,
    die_with_parent,
    mount,
    unshare,
)

OWNER = 1_900_000_001
"""User and group of sandboxes where the launcher is root: outside of every range that Linux distributions assign."""


def main(descriptor: int, parent: str) -> None:
    """Serve the worker at the other end of a socket until it closes it. `parent` is the folder of all launchers."""
    worker = socket.socket(fileno=descriptor)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # one for each sandbox
    work = Path(parent) / f"{leftovers.PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    try:
        machine, lock = _prepare(work)
    except OSError as error:
        wire.send(worker, {"unavailable": f"{error}"})
        return
    try:
        wire.send(worker, _hello(machine))
        Launcher(machine, worker).run()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        if roots.remove(work):
            os.close(lock)


def _prepare(work: Path) -> tuple[Machine, int]:
    tree = find()
    rootless = _own_namespace()
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    owner = None if rootless else sandbox_owner()
    _try_user_namespace(owner)
    leftovers.remove(work.parent, tree)
    work.mkdir(mode=0o711, parents=True)
    lock = leftovers.own(work)
    skeleton = work / "skeleton"
    skeleton.mkdir()
    roots.make_skeleton(skeleton, owner or 0)
    machine = platform.machine()
    code = seccomp.program(machine) if seccomp.supported(machine) else b""
    return Machine(work, owner, rootless, _overlays(work, rootless=rootless), tree, code, skeleton), lock


def _own_namespace() -> bool:
    """Enter a mount namespace of its own; whether that needed a user namespace."""
    if os.geteuid() == 0:
        with suppress(OSError):
            os.setgroups([])
            unshare(CLONE_NEWNS)
            return False
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return True


def _try_user_namespace(owner: int | None) -> None:
    """What bubblewrap will do, as the user that it will be."""
    child = os.fork()
    if child == 0:
        code = 0
        try:
            if owner is not None:
                os.setresgid(owner, owner, owner)
                os.setresuid(owner, owner, owner)
            unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET)
        except OSError as error:
            code = error.errno or errno.EPERM
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    number = os.waitstatus_to_exitcode(status)
    if number:
        raise OSError(number, f"user namespaces are off: {os.strerror(number)}")


def sandbox_owner() -> int:
    """`OWNER`, or the last user that exists if this root is one of a smaller user namespace."""
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    if any(first <= OWNER < first + count for first, _, count in ranges):
        return OWNER
    return max(first + count - 1 for first, _, count in ranges)


def _overlays(work: Path, *, rootless: bool) -> bool:
    """Whether an overlay over a tmpfs can be mounted and hides a file of its base."""
    trial, base = work / "trial", work / "trial-base"
    base.mkdir()
    (base / "folder").mkdir()
    (base / "folder" / "file").touch()
    root = roots.Root(trial, 0, rootless=rootless, overlays=True)
    try:
        root.make([str(base)], {"disk_mb": 1, "files": 100})
        (root.path / "folder" / "file").unlink()
        (root.path / "folder").rmdir()
        (root.path / "folder").mkdir()
        return not os.listdir(root.path / "folder")
    except OSError:
        return False
    finally:
        roots.remove(trial)
        roots.remove(base)


def _hello(machine: Machine) -> dict[str, Any]:
    tree = machine.tree
    return {
        "work": str(machine.work),
        "owner": machine.owner,
        "rootless": machine.rootless,
        "overlays": machine.overlays,
        "cgroups": {
            "version": tree.version,
            "memory": tree.memory is not None,
            "pids": tree.pids is not None,
            "missing": tree.missing,
        },
        "seccomp": bool(machine.filter),
        "host_base": roots.host_is_usable(),
    }


class Launcher:
    """Forks a supervisor per sandbox, and removes what one leaves behind that was killed."""

    def __init__(self, machine: Machine, worker: socket.socket) -> None:
        self._machine, self._worker = machine, worker
        self._supervisors: dict[int, tuple[int, str]] = {}
        """Descriptor that is readable when it has ended → process, name of the sandbox."""

    def run(self) -> None:
        open_ = True
        while open_ or self._supervisors:
            worker = self._worker.fileno()
            readable = wire.wait([*([worker] if open_ else []), *self._supervisors])
            for descriptor in readable - {worker}:
                self._ended(descriptor)
            if worker in readable:
                open_ = self._create()

    def _create(self) -> bool:
        """Start a supervisor; False if the worker is gone.

        If there are too many processes or open files, this creation alone fails: its control socket is closed.
        """
        try:
            received = wire.receive(self._worker)
        except wire.Cut:
            return True
        if received is None:
            return False
        order, (descriptor,) = received
        with suppress(OSError):
            self._fork(order, descriptor)
        os.close(descriptor)
        return True

    def _fork(self, order: dict[str, Any], descriptor: int) -> None:
        process = os.fork()
        if process == 0:
            self._supervise(order, descriptor)
        try:
            ended = os.pidfd_open(process)
        except OSError:
            os.kill(process, signal.SIGTERM)
            os.waitpid(process, 0)
            raise
        self._supervisors[ended] = (process, order["name"])

    def _supervise(self, order: dict[str, Any], descriptor: int) -> None:
        code = 1
        try:
            # The launcher's end of the worker's socket must not outlive the launcher.
            self._worker.close()
            wire.close(*self._supervisors)
            signal.signal(signal.SIGTERM, _stop)
            die_with_parent(signal.SIGTERM, order_parent(self._machine))
            with socket.socket(fileno=descriptor) as control:
                Supervisor(self._machine, control, order).run()
            code = 0
        finally:
            os._exit(code)

    def _ended(self, descriptor: int) -> None:
        process, name = self._supervisors.pop(descriptor)
        os.close(descriptor)
        os.waitpid(process, 0)
        remove_sandbox(self._machine.work / name, self._machine.tree)


def order_parent(machine: Machine) -> int:
    """Process id of the launcher, which is in the name of its folder."""
    return int(machine.work.name.removeprefix(leftovers.PREFIX).partition("-")[0])


def _stop(*_: object) -> None:
    raise SystemExit


def remove_sandbox(folder: Path, tree: Tree) -> None:
    """What a supervisor that was killed leaves. Its processes are dead, and end within moments."""
    leftovers.remove_group(Group(tree, folder.name))
    roots.remove(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
