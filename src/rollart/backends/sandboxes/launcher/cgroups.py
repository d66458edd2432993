"""A cgroup for the commands of one sandbox: version 2 where delegated, version 1 where writable, or none.

`find()` looks where this process is, and returns a `Tree`: the folders below which groups can be made. Groups are named
after the sandbox; removing one needs that its processes are gone.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MB = 2**20
LEAF = "rollart-launcher"
"""Version 2 allows processes in leaves only: the launcher moves into one of its own."""


@dataclass(frozen=True)
class Tree:
    version: int
    """0: there is none."""
    memory: Path | None = None
    pids: Path | None = None
    missing: str = ""
    """Why a controller is not used."""

    def folders(self) -> list[Path]:
        """Without duplicates: in version 2 both controllers share one."""
        return list(dict.fromkeys(path for path in (self.memory, self.pids) if path is not None))


@dataclass
class Group:
    """The cgroup of one sandbox."""

    tree: Tree
    name: str

    @property
    def limits_memory(self) -> bool:
        return self.tree.memory is not None

    @property
    def limits_processes(self) -> bool:
        return self.tree.pids is not None

    def make(self, memory_mb: int, processes: int) -> None:
        for folder in self.tree.folders():
            (folder / self.name).mkdir(exist_ok=True)
        if self.tree.memory is not None:
            memory = self.tree.memory / self.name
            names = ("memory.max", "memory.swap.max") if self.tree.version == 2 else ("memory.limit_in_bytes",)
            for number, name in enumerate(names):
                if (memory / name).exists():
                    (memory / name).write_text(str(0 if number else memory_mb * MB))
            if self.tree.version == 1 and (memory / "memory.memsw.limit_in_bytes").exists():
                (memory / "memory.memsw.limit_in_bytes").write_text(str(memory_mb * MB))
        if self.tree.pids is not None:
            (self.tree.pids / self.name / "pids.max").write_text(str(processes))

    def open(self) -> list[int]:
        """Descriptors to write `0` to for joining, so that it works from another mount namespace."""
        return [os.open(folder / self.name / "cgroup.procs", os.O_WRONLY) for folder in self.tree.folders()]

    def out_of_memory(self) -> int:
        """Processes killed by the limit so far."""
        if self.tree.memory is None:
            return 0
        name = "memory.events" if self.tree.version == 2 else "memory.oom_control"
        return _counter(self.tree.memory / self.name / name, "oom_kill")

    def forks_refused(self) -> int:
        return 0 if self.tree.pids is None else _counter(self.tree.pids / self.name / "pids.events", "max")

    def processes(self) -> int | None:
        """Processes and threads of commands; None if they are not counted."""
        if self.tree.pids is None:
            return None
        return int((self.tree.pids / self.name / "pids.current").read_text())

    def remove(self) -> bool:
        """Whether it is gone; False while a process in it still ends."""
        for folder in self.tree.folders():
            try:
                (folder / self.name).rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True


def _counter(path: Path, name: str) -> int:
    with suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def find(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Tree:
    """Groups that this process may make. Changes nothing, except that it moves itself into a leaf in version 2."""
    try:
        paths = dict(_own_path(line) for line in own.read_text().splitlines())
    except OSError:
        return Tree(0, missing="/proc/self/cgroup cannot be read")
    unified = next((path for path in (root, root / "unified") if (path / "cgroup.controllers").is_file()), None)
    if unified is not None and "" in paths:
        tree = _version2(unified / paths[""].lstrip("/"))
        if tree.memory is not None:
            return tree
    found = {name: _version1(root / name, paths[name]) for name in ("memory", "pids") if name in paths}
    memory, pids = found.get("memory"), found.get("pids")
    absent = [name for name, folder in (("memory", memory), ("pids", pids)) if folder is None]
    missing = f"no writable cgroup for {' and '.join(absent)}" if absent else ""
    return Tree(1 if memory or pids else 0, memory, pids, missing)


def _own_path(line: str) -> tuple[str, str]:
    """
    >>> _own_path("4:memory:/job/7"), _own_path("0::/user.slice")
    (('memory', '/job/7'), ('', '/user.slice'))
    """
    _, names, path = line.split(":", 2)
    return names, path


def _version1(mounted: Path, path: str) -> Path | None:
    """Below the own group, or the mount point, which is what a container sees of its own group."""
    for folder in (mounted / path.lstrip("/"), mounted):
        if (folder / "cgroup.procs").is_file() and _makes_groups(folder):
            return folder
    return None


def _version2(folder: Path) -> Tree:
    try:
        if not {"memory", "pids"} <= set((folder / "cgroup.controllers").read_text().split()):
            return Tree(0, missing=f"memory and pids are not delegated to {folder}")
        leaf = folder / LEAF
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text("0")
        (folder / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError as error:
        return Tree(0, missing=f"{folder} is not delegated to this process alone ({error.strerror})")
    return Tree(2, folder, folder)


def _makes_groups(folder: Path) -> bool:
    trial = folder / f"rollart-trial-{os.getpid()}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError:
        return False
    return True
