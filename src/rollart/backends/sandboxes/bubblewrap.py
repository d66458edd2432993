"""Sandboxes by bubblewrap: namespaces, cgroups, seccomp and a writable layer in memory. See docs/sandbox.md.

with BubblewrapSandboxes() as sandboxes:
    sandbox = sandboxes.create(SandboxSpec())
    sandbox.write_file("hello.py", b"print('hello')")
    print(sandbox.exec(["python3", "hello.py"]).stdout)
    sandbox.reset()
"""

import os
import stat
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from rollart.backends.sandboxes.connection import GRACE_S, Connection, LauncherProcess, check_fits, sealed_file
from rollart.backends.sandboxes.folders import receive_folder, send_file, send_folder
from rollart.backends.sandboxes.launcher.roots import HOST
from rollart.backends.sandboxes.machine import mechanisms
from rollart.backends.sandboxes.pool import WarmPool
from rollart.backends.sandboxes.snapshots import Snapshots
from rollart.ports.sandbox import MAX_DOWNLOAD_BYTES, MAX_DOWNLOAD_FILES, MAX_READ_BYTES, OnOutput
from rollart.types.errors import SandboxFault, SandboxFileError, SandboxLost, SandboxUnavailable
from rollart.types.sandboxes import ExecResult, Mechanism, SandboxSpec

CREATE_S = 45.0
TRANSFER_S = 300.0
NOT_FOUND, NOT_EXECUTABLE = 127, 126
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
}


class _Key(NamedTuple):
    """What sandboxes of the pool have in common."""

    spec: SandboxSpec
    layers: tuple[str, ...]


class BubblewrapSandboxes:
    """Sandboxes of this process. Thread-safe. Nothing is started before the first `create` or `mechanisms`."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        warm: int = 2,
        makers: int = 4,
        snapshot_mb: int = 4096,
        as_user: int | None = None,
    ) -> None:
        """Settings of all sandboxes of this process.

        `folder`: for sandboxes and snapshots, shared by the workers of a user; in the temporary folder by default.
        `warm`: sandboxes of each recently used spec that are kept ready. `makers`: number of creations at once.
        `snapshot_mb`: disk quota of all snapshots. `as_user`: for a worker that is root: user of everything that
        belongs to sandboxes, the launcher included. It needs to be able to read this package, and has no cgroups
        unless it may make them.
        """
        user = os.geteuid() if as_user is None else as_user
        self._parent = folder or Path(tempfile.gettempdir()) / f"rollart-sandboxes-{user}"
        self._snapshot_mb = snapshot_mb
        self._user = user
        self._lock = threading.Lock()
        self._launcher: LauncherProcess | None = None
        self._snapshots: Snapshots | None = None
        self._made: weakref.WeakSet[BubblewrapSandbox] = weakref.WeakSet()
        self._closed = False
        self._pool: WarmPool[_Key, Connection] = WarmPool(
            self._make, Connection.close, lambda made: made.open, warm=warm, makers=makers, name="sandboxes"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def create(
        self, spec: SandboxSpec, *, snapshot: str | None = None, deadline_s: float = 60.0, once: bool = False
    ) -> "BubblewrapSandbox":
        key = self._key(spec, snapshot)
        sandbox = BubblewrapSandbox(self, spec, key.layers, self._take(key, deadline_s, warm=not once))
        with self._lock:
            self._made.add(sandbox)
        return sandbox

    def ready(self, spec: SandboxSpec) -> int:
        """Number of warm sandboxes of a spec, without snapshot."""
        return self._pool.ready(self._key(spec, None))

    def forget(self, snapshot: str) -> None:
        snapshots = self._snapshots
        if snapshots is not None:
            gone = str(snapshots.folder / snapshot)
            self._pool.drop(lambda key: gone in key.layers[:1])
            snapshots.forget(snapshot)
            self._remove_unneeded()

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return mechanisms(self._running().about)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            made = list(self._made)
            snapshots, self._snapshots = self._snapshots, None
        self._pool.close()
        for sandbox in made:
            sandbox.close()
        if self._launcher is not None:
            self._launcher.close()
        if snapshots is not None:
            snapshots.close()

    # --- for its sandboxes ------------------------------------------------------------------------------------------

    def _key(self, spec: SandboxSpec, snapshot: str | None) -> _Key:
        layers = self._kept().layers(snapshot) if snapshot is not None else ()
        return _Key(spec, layers)

    def _take(self, key: _Key, deadline_s: float, *, warm: bool = True) -> Connection:
        self._check(key.spec)
        return self._pool.take(key, deadline_s, warm=warm)

    def _remove_unneeded(self) -> None:
        """Remove layers of forgotten snapshots that no sandbox uses any more."""
        with self._lock:
            in_use = {layer for sandbox in self._made for layer in sandbox.layers}
            snapshots = self._snapshots
        if snapshots is not None:
            snapshots.remove_unneeded(in_use)

    def _kept(self) -> Snapshots:
        self._running()
        assert self._snapshots is not None
        return self._snapshots

    def _running(self) -> LauncherProcess:
        """The launcher; a new one if it was killed."""
        with self._lock:
            if self._closed:
                raise SandboxFault("the source of sandboxes was closed")
            if self._launcher is None or not self._launcher.alive:
                try:
                    self._launcher = self._started()
                except OSError as error:
                    raise SandboxFault(f"the launcher of sandboxes cannot be started: {error}") from error
            return self._launcher

    def _started(self) -> LauncherProcess:
        self._parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        if os.geteuid() == 0 and self._user:
            os.chown(self._parent, self._user, self._user)
        if self._parent.stat().st_uid != self._user:
            raise SandboxUnavailable(f"{self._parent} belongs to another user; give another folder")
        if self._launcher is not None:
            self._launcher.close()
        if os.geteuid() == 0:
            _check_reachable(self._parent.resolve())
        launcher = LauncherProcess(self._parent, self._user if self._user != os.geteuid() else None)
        try:
            if self._snapshots is None:
                self._snapshots = Snapshots(self._parent, self._snapshot_mb, self._user)
        except OSError:
            launcher.close()
            raise
        return launcher

    def _make(self, key: _Key) -> Connection:
        launcher = self._running()
        owner = launcher.about["owner"]
        for _, path in key.spec.sockets:
            _open_to(Path(path), owner)
        order = {
            "base": key.spec.base if key.spec.base == HOST else str(Path(key.spec.base).resolve()),
            "layers": key.layers,
            "limits": msgspec.to_builtins(key.spec.limits),
            "root": key.spec.root,
            "sockets": key.spec.sockets,
            "read_only": [(inside, str(Path(outside).resolve())) for inside, outside in key.spec.read_only],
            "workdir": key.spec.workdir,
        }
        return launcher.open(order, CREATE_S)

    def _check(self, spec: SandboxSpec) -> None:
        """Refuse what can be known to fail, before it is tried several times."""
        if spec.base == HOST:
            if problem := self._running().about["host_base"]:
                raise SandboxUnavailable(problem)
        elif not Path(spec.base).is_dir():
            raise SandboxUnavailable(f"the base of a sandbox, {spec.base}, is no folder; use a folder or 'host'")
        for _, path in spec.sockets:
            if not Path(path).is_socket():
                raise SandboxUnavailable(f"{path} should be a Unix socket, and there is none; start its server first")
        for _, path in spec.read_only:
            if not Path(path).exists():
                raise SandboxUnavailable(f"{path} should be mounted into sandboxes and does not exist")
        for path in (spec.workdir, *(inside for inside, _ in (*spec.sockets, *spec.read_only))):
            if not path.startswith("/") or ".." in path.split("/"):
                raise SandboxUnavailable(f"{path!r} is not an absolute path in a sandbox")


def _check_reachable(folder: Path) -> None:
    """Bubblewrap runs as a user other than root, which must be able to reach the folder."""
    for path in (folder, *folder.parents):
        if not path.stat().st_mode & stat.S_IXOTH:
            raise SandboxUnavailable(
                f"sandboxes run as an unprivileged user, who cannot enter {path}; chmod o+x it, or give another folder"
            )


def _open_to(path: Path, owner: int | None) -> None:
    """Let the user of sandboxes connect to a socket; others of this machine gain nothing."""
    if owner is not None and path.stat().st_gid != owner:
        os.chown(path, -1, owner)
    if owner is not None:
        path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IRGRP | stat.S_IWGRP)


class BubblewrapSandbox:
    """One sandbox; made by `BubblewrapSandboxes`."""

    def __init__(
        self, source: BubblewrapSandboxes, spec: SandboxSpec, layers: tuple[str, ...], connection: Connection
    ) -> None:
        self._source, self._spec = source, spec
        self.layers = layers
        """Snapshot layers that it is made of."""
        self._connection = connection
        self._lock = threading.Lock()
        self._closed = False

    @property
    def name(self) -> str:
        return self._connection.name

    @property
    def process(self) -> int:
        """Process id of the keeper on this machine: killing it kills the sandbox."""
        return self._connection.process

    def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        time_s: float | None = None,
        keep_background: bool = False,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        if not command:
            raise ValueError("a command needs at least the name of a program")
        order = {
            "do": "exec",
            "command": list(command),
            "env": self._environment(env or {}),
            "cwd": self._path(cwd or "."),
            "time_s": self._spec.limits.time_s if time_s is None else time_s,
            "keep_background": keep_background,
        }
        check_fits(order)
        content = sealed_file(stdin)
        limit_bytes = self._spec.limits.output_kb * 1024
        try:
            with self._lock:
                answer, stdout, stderr = self._connection.run(order, content, limit_bytes, on_output)
        finally:
            os.close(content)
        number, problem = answer["failed"]
        if problem:
            stderr.add(f"{command[0]}: {problem}\n".encode())
            code = NOT_FOUND if number == 2 else NOT_EXECUTABLE
            answer |= {"exit_code": code, "signal": None}
        return ExecResult(
            exit_code=answer["exit_code"],
            signal=answer["signal"],
            stdout=stdout.bytes(),
            stderr=stderr.bytes(),
            stdout_dropped=stdout.dropped,
            stderr_dropped=stderr.dropped,
            timed_out=answer["timed_out"],
            memory_exceeded=answer["memory_exceeded"],
            processes_exceeded=answer["processes_exceeded"],
            disk_full=answer["disk_full"],
            seconds=answer["seconds"],
        )

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        home, user = ("/root", "root") if self._spec.root else ("/home/agent", "agent")
        return ENVIRONMENT | {"HOME": home, "USER": user} | dict(self._spec.env) | dict(more)

    def _path(self, path: str) -> str:
        return os.path.normpath(os.path.join(self._spec.workdir, path)) if ".." not in path else self._plain(path)

    def _plain(self, path: str) -> str:
        """Links are resolved inside, so that `..` is not shortened here."""
        return path if path.startswith("/") else f"{self._spec.workdir}/{path}"

    # --- files ------------------------------------------------------------------------------------------------------

    def read_file(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        _, (descriptor,) = self._transfer({"do": "read", "path": self._path(path)})
        with open(descriptor, "rb", buffering=0) as file:
            content = bytearray()
            while chunk := file.read(min(2**20, max_bytes + 1 - len(content))):
                content += chunk
        if len(content) > max_bytes:
            raise SandboxFileError(f"{path} has more than {max_bytes} bytes")
        return bytes(content)

    def write_file(self, path: str, content: bytes, *, executable: bool = False) -> None:
        order = {"do": "write", "path": self._path(path), "executable": executable}
        with send_file(content) as descriptor:
            self._transfer(order, descriptor)

    def upload(self, source: Path, target: str) -> None:
        with send_folder(source) as descriptor:
            self._transfer({"do": "unpack", "path": self._path(target)}, descriptor)

    def download(
        self,
        source: str,
        target: Path,
        *,
        max_bytes: int = MAX_DOWNLOAD_BYTES,
        max_files: int = MAX_DOWNLOAD_FILES,
    ) -> None:
        with receive_folder(target, max_bytes=max_bytes, max_files=max_files) as descriptor:
            self._transfer({"do": "pack", "path": self._path(source)}, descriptor)

    def _transfer(self, order: dict[str, Any], *descriptors: int) -> tuple[dict[str, Any], list[int]]:
        check_fits(order)
        with self._lock:
            answer, received = self._connection.call(order, descriptors, TRANSFER_S)
        if "error" in answer:
            raise SandboxFileError(answer["error"])
        return answer, received

    # --- life -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> str:
        kept = self._source._kept()
        name, folder = kept.draft()
        with self._lock:
            try:
                answer, _ = self._connection.call({"do": "keep", "target": str(folder)}, (), TRANSFER_S)
                if "unreasonable" in answer:
                    raise SandboxFileError(f"sandbox {self.name} cannot be kept: {answer['unreasonable']}")
                if "error" in answer:
                    raise SandboxFault(f"sandbox {self.name} could not be kept: {answer['error']}")
                kept.add(name, self.layers)
            except BaseException:
                kept.discard(name)
                raise
        return name

    def reset(self, snapshot: str | None = None) -> None:
        key = self._source._key(self._spec, snapshot)
        self._connection.close()
        with self._lock:
            if self._closed:
                raise SandboxLost(f"sandbox {self.name} was closed")
            self._connection = self._source._take(key, CREATE_S + GRACE_S)
            before, self.layers = self.layers, key.layers
        if before != key.layers:
            self._source._remove_unneeded()

    def close(self) -> None:
        self._closed = True
        self._connection.close()
        with self._lock:
            self._connection.close()  # a reset may have replaced it meanwhile
            before, self.layers = self.layers, ()
        if before:
            self._source._remove_unneeded()
