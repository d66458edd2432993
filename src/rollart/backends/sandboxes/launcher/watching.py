"""What happened to a command: judged from the status that its parent got and the counters of its cgroup.

A command killed by SIGKILL that we did not send either killed itself, which is its result, or the machine ran out of
memory, which is not. The kernel's counter of such kills tells, if the sandbox's own limit explains none.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

from rollart.backends.sandboxes.launcher.cgroups import Group

LOOK_S = 0.05
"""Interval of the watchdog that measures memory where no cgroup limits it."""
SETUP = "setup: "
"""Prefix of a failure that came before the program was looked for."""


@dataclass(frozen=True)
class Counters:
    out_of_memory: int
    """Number of processes of the sandbox killed for memory."""
    forks_refused: int
    machine_out_of_memory: int


@dataclass(frozen=True)
class End:
    """The end of a command as its joiner saw it."""

    status: int
    failed: str
    """JSON of an error number and a text if the program could not be started; the program cannot write it."""
    cpu_s: float
    killed_by: str
    """Why we killed it; empty if we did not."""


def counters(group: Group) -> Counters:
    machine = 0
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                machine = int(line.split()[1])
    return Counters(group.out_of_memory(), group.forks_refused(), machine)


def judge(end: End, before: Counters, after: Counters) -> dict[str, Any]:
    """The answer for a command.

    >>> none, machine = Counters(0, 0, 0), Counters(0, 0, 1)
    >>> judge(End(9, "", 0.1, ""), none, none)["signal"]
    9
    >>> judge(End(9, "", 0.1, ""), none, machine)["lost"]
    'the machine ran out of memory and the kernel killed its command'
    """
    own = after.out_of_memory > before.out_of_memory
    machine = after.machine_out_of_memory > before.machine_out_of_memory
    if end.status == SIGKILL and machine and not own and not end.killed_by:
        return {"lost": "the machine ran out of memory and the kernel killed its command"}
    number, failed = json.loads(end.failed) if end.failed else (0, "")
    if failed.startswith(SETUP):
        return {"lost": f"its command could not be started: {failed.removeprefix(SETUP)}"}
    signalled = os.WIFSIGNALED(end.status)
    return {
        "exit_code": None if signalled else os.WEXITSTATUS(end.status),
        "signal": os.WTERMSIG(end.status) if signalled else None,
        "failed": [number, failed],
        "cpu_s": end.cpu_s,
        "timed_out": end.killed_by == "time",
        "memory_exceeded": own or end.killed_by == "memory",
        "processes_exceeded": after.forks_refused > before.forks_refused,
    }


class Watch:
    """Memory of all processes of a sandbox, where no cgroup counts it."""

    def __init__(self, keeper: int, limit_mb: int) -> None:
        self._proc = Path(f"/proc/{keeper}/root/proc")
        self._limit = limit_mb * 2**20
        self._page = os.sysconf("SC_PAGE_SIZE")

    def over(self) -> bool:
        return self.used() > self._limit

    def used(self) -> int:
        """Resident memory without mapped files, in bytes: RSS minus shared pages, as `statm` has them."""
        total = 0
        for entry in os.scandir(self._proc):
            if entry.name.isdigit():
                with suppress(OSError):  # just ended
                    fields = (Path(entry.path) / "statm").read_text().split()
                    total += (int(fields[1]) - int(fields[2])) * self._page
        return total
