"""What a sandbox may use, what a command in it did, and what the machine enforces.

A command that runs over a limit has a result that says so: the agent chose the command. What fails outside the agent's
reach has no result, it raises `SandboxLost` or `SandboxFault` (`types.errors`).

    >>> result = ExecResult(exit_code=None, signal=9, memory_exceeded=True)
    >>> result.ok, result.exceeded
    (False, ('memory',))
"""

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one sandbox: of all its processes together unless noted."""

    time_s: float = 60.0
    """Wall-clock time of one command, unless the call gives less or more."""
    memory_mb: int = 512
    """Memory of processes. The writable layer is memory too and comes on top, with `disk_mb`."""
    processes: int = 128
    """Processes and threads."""
    open_files: int = 512
    """Open files per process."""
    file_mb: int = 256
    """Size of one file."""
    disk_mb: int = 512
    """Size of the writable layer, including /tmp and /dev/shm."""
    files: int = 50_000
    """Files and folders of the writable layer."""
    output_kb: int = 256
    """Kept of stdout and of stderr: the first and the last half; the rest is read and dropped."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


HOST_BASE = "host"
"""Base whose /usr is that of the machine, read-only, with a small /etc of its own."""


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a sandbox is made. Sandboxes with equal specs are interchangeable, which is what a warm pool relies on."""

    base: str = HOST_BASE
    """`host`, or the path of a folder with a root file system."""
    limits: Limits = Limits()
    env: tuple[tuple[str, str], ...] = ()
    """Environment of every command. Nothing is inherited from the machine."""
    workdir: str = "/work"
    """Working directory of commands; created if it is missing."""
    root: bool = False
    """Commands see themselves as root. They have no privilege of it, but own the files of a base that was built so."""
    sockets: tuple[tuple[str, str], ...] = ()
    """(path inside, Unix socket of this machine): endpoints that the sandbox may reach."""
    read_only: tuple[tuple[str, str], ...] = ()
    """(path inside, folder or file of this machine), mounted read-only."""


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was observed of a command, from outside of it."""

    exit_code: int | None
    """None if a signal ended it. 127: no such program, 126: not executable."""
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_dropped: int = 0
    """Bytes beyond the limit of output; a line in `stdout` marks the place."""
    stderr_dropped: int = 0
    timed_out: bool = False
    memory_exceeded: bool = False
    """A process was killed because all together used too much memory. The command itself may have survived."""
    processes_exceeded: bool = False
    """A process or thread could not be started."""
    disk_full: bool = False
    """The writable layer had no room for another block or file when the command ended."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def exceeded(self) -> tuple[str, ...]:
        """Limits that the command ran into."""
        flags = {
            "time": self.timed_out,
            "memory": self.memory_exceeded,
            "processes": self.processes_exceeded,
            "disk": self.disk_full,
            "output": bool(self.stdout_dropped or self.stderr_dropped),
        }
        return tuple(name for name, over in flags.items() if over)


class Mechanism(msgspec.Struct, frozen=True):
    """One part of the isolation and how it is enforced here."""

    part: str
    in_force: bool
    by: str
    """The mechanism; if it is not in force, what is missing and what to do."""
