"""Entering a sandbox from outside, and becoming its user for good.

The joiner is no process of the sandbox: it holds no PID there and waits outside for the command, so that nothing inside
can signal it or replace what it observes. Modules are not imported any more once it has entered, because the files
are those of the agent.
"""

import ctypes
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollart.backends.sandboxes.launcher.syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    drop_capabilities,
    install_filter,
    prctl,
    setns,
)

MB = 2**20
# The user namespace comes last: the privilege to enter the others is that of the one outside.
KINDS = {
    "pid": CLONE_NEWPID,
    "ipc": CLONE_NEWIPC,
    "uts": CLONE_NEWUTS,
    "net": CLONE_NEWNET,
    "cgroup": CLONE_NEWCGROUP,
    "mnt": CLONE_NEWNS,
    "user": CLONE_NEWUSER,
}
SPARE_PROCESSES = 16
OOM_FIRST = "1000"
"""The kernel ends processes of sandboxes before any other when the machine runs out of memory."""


@dataclass(frozen=True)
class Door:
    """How to get into one sandbox."""

    namespaces: Mapping[str, int]
    """Descriptors, by kind."""
    user: int
    """User and group inside."""
    cgroups: tuple[int, ...]
    """Descriptors of `cgroup.procs`."""

    @classmethod
    def of(cls, process: int, user: int, cgroups: list[int]) -> "Door":
        kinds = [kind for kind in KINDS if os.path.exists(f"/proc/{process}/ns/{kind}")]
        opened = {kind: os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY) for kind in kinds}
        return cls(opened, user, tuple(cgroups))

    def join_groups(self) -> None:
        """Put this process into the cgroups of the sandbox. Before `enter`."""
        for descriptor in self.cgroups:
            os.write(descriptor, b"0")

    def enter(self) -> None:
        """Enter all namespaces; children are processes of the sandbox, this one is not."""
        sys.path.clear()
        sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "__name__", "") == "BuiltinImporter"]
        for kind, descriptor in self.namespaces.items():
            setns(descriptor, KINDS[kind])
        os.chdir("/")

    def become_user(self) -> None:
        """Give up all privileges. Not dumpable: processes of the same user cannot look into this one."""
        prctl(PR_SET_DUMPABLE, 0)
        os.setresgid(self.user, self.user, self.user)
        os.setresuid(self.user, self.user, self.user)
        drop_capabilities()
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_DUMPABLE, 0)


def limit(limits: Mapping[str, Any], *, memory: bool, processes: bool) -> None:
    """Limits that the kernel keeps per process or user. `memory`, `processes`: no cgroup limits them."""
    values = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_FSIZE: limits["file_mb"] * MB,
        # Counted per user and user namespace, with the keeper. A cgroup should notice first, because it tells.
        resource.RLIMIT_NPROC: limits["processes"] + (1 if processes else SPARE_PROCESSES),
        resource.RLIMIT_MEMLOCK: 0,
    }
    if memory:
        values[resource.RLIMIT_DATA] = limits["memory_mb"] * MB
    for kind, value in values.items():
        _, hard = resource.getrlimit(kind)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))


def mark_for_oom() -> None:
    """Before `enter`, where /proc is that of the machine."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(OOM_FIRST)


def keep_first(count: int) -> None:
    """Close all open files but the first ones."""
    os.closerange(count, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def confine(code: bytes) -> None:
    """Apply the seccomp filter; an empty one is none."""
    if code:
        install_filter(code)


def kill_everything() -> None:
    """All processes of the sandbox except its keeper and this one. In a child of the joiner, as its user.

    The kernel does it atomically: a process that is forking gets the signal before it has a child.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.kill(-1, 9)
