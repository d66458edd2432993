"""What isolates and limits a sandbox on this machine, in words; for `rollart doctor` and for logs."""

from collections.abc import Iterator, Mapping
from typing import Any

from rollart.types.sandboxes import Mechanism

CGROUP = {1: "cgroup v1", 2: "cgroup v2"}


def mechanisms(about: Mapping[str, Any]) -> tuple[Mechanism, ...]:
    """From what the launcher found out at its start."""
    return tuple(_mechanisms(about))


def _mechanisms(about: Mapping[str, Any]) -> Iterator[Mechanism]:
    user = "root in a user namespace of its own" if about["rootless"] else f"unprivileged user {about['owner']}"
    yield Mechanism("isolation", True, f"user, PID, mount, network, IPC, UTS and cgroup namespaces, as {user}")
    yield Mechanism("privileges", True, "no capabilities, no_new_privs, nosuid")
    if about["seccomp"]:
        yield Mechanism("system calls", True, "seccomp filter")
    else:
        yield Mechanism("system calls", False, "no seccomp filter: there is none for this processor")
    if about["overlays"]:
        yield Mechanism("files", True, "overlay over a read-only base; writable layer in memory, of limited size")
    else:
        yield Mechanism("files", True, "a copy of the base per sandbox, in memory: overlays cannot be mounted here")
    if about["host_base"]:
        yield Mechanism("base 'host'", False, about["host_base"])
    yield from _limits(about["cgroups"])
    yield Mechanism("time, output, disk", True, "supervisor outside of the sandbox; size of the writable layer")


def _limits(cgroups: Mapping[str, Any]) -> Iterator[Mechanism]:
    name = CGROUP.get(cgroups["version"], "")
    remedy = f"{cgroups['missing'] or 'no cgroups'}; delegate a cgroup (systemd-run --user --scope -p Delegate=yes)"
    if cgroups["memory"]:
        yield Mechanism("memory", True, f"{name}, of all processes together")
    else:
        text = "watchdog that samples all processes together, and RLIMIT_DATA per process"
        yield Mechanism("memory", True, f"{text} ({remedy})")
    if cgroups["pids"]:
        yield Mechanism("processes", True, f"{name} and RLIMIT_NPROC")
    else:
        yield Mechanism("processes", True, f"RLIMIT_NPROC of the user namespace ({remedy})")
