"""Builds: a Dockerfile becomes a snapshot that sandboxes start from. Once per content, in a sandbox, without network.

    lease(image) ──► known? ── yes ──► wait for its builder, or take it
                       └─ no ──► build: create, RUN, COPY, …, snapshot

Invariants:
- images with equal digests are built once at a time; other callers wait for the builder;
- a build is not forgotten while it is leased. Others are, the least recently used first, when the disk quota of
  snapshots is used up;
- what fails because of the Dockerfile is `BuildFailed`, and not tried again; what fails outside of it is a
  `SandboxFault`, and is.
"""

import posixpath
import shlex
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rollart.ports.sandbox import Sandbox, Sandboxes
from rollart.tasks.harbor.dockerfile import Copy, Env, Run, Step, User, Workdir, expanded
from rollart.tasks.harbor.folders import Image
from rollart.tasks.sandboxes import shared_sandboxes
from rollart.types.errors import BuildFailed, RollartError, SandboxFault, SandboxFileError, SnapshotsFull
from rollart.types.sandboxes import ExecResult, Limits, SandboxSpec

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ALIASES = "/opt/rollart/bin"
"""For `python`, where a root has only `python3`."""
FOLDERS = "/logs/agent /logs/verifier /logs/artifacts /opt /srv /mnt"
"""Folders that images have, and those of Harbor."""
MEMORY_MB, DISK_MB, PROCESSES, FILES = 2048, 2048, 256, 200_000
"""Limits of a task that declares none."""
GRACE_S = 120.0
"""Beyond its own limit, others wait so long for a build."""
OUTPUT_CHARS = 1500
ROOT_USERS = ("root", "0")
_NETWORK = ("apt-get", "apt ", "pip ", "pip3 ", "curl", "wget", "git clone", "npm", "uv ", "conda")


class Built(NamedTuple):
    """A snapshot, and what the instructions say of commands in it."""

    snapshot: str
    env: tuple[tuple[str, str], ...]
    workdir: str
    user: str


class _Entry:
    """One content; `built` or `error` once it is `ready`."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.built: Built | None = None
        self.error: RollartError | None = None
        self.leases = 0


class Builds:
    """All builds of one source of sandboxes. Thread-safe."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """The least recently used first."""
        self.count = 0
        """Builds so far, for tests and messages."""

    @property
    def sandboxes(self) -> Sandboxes:
        return self._sandboxes

    @contextmanager
    def lease(self, image: Image, time_s: float) -> Iterator[Built]:
        """The build of an image, which stays while this is open."""
        with self._lock:
            entry = self._entries.get(image.digest)
            mine = entry is None
            if entry is None:
                entry = self._entries[image.digest] = _Entry()
            self._entries.move_to_end(image.digest)
            entry.leases += 1
        try:
            if mine:
                self._fill(entry, image, time_s)
            elif not entry.ready.wait(time_s + GRACE_S):
                raise SandboxFault(f"the build of {_name(image)} by another episode was not done in time")
            if entry.error is not None:
                raise type(entry.error)(str(entry.error))
            assert entry.built is not None
            yield entry.built
        finally:
            with self._lock:
                entry.leases -= 1

    def snapshot(self, sandbox: Sandbox) -> str:
        """Keep a sandbox; forgets builds that are not leased if there is no room."""
        while True:
            try:
                return sandbox.snapshot()
            except SnapshotsFull:
                if not self._forget_one():
                    raise

    def _forget_one(self) -> bool:
        with self._lock:
            for digest, entry in self._entries.items():
                if entry.built is not None and not entry.leases:
                    del self._entries[digest]
                    self._sandboxes.forget(entry.built.snapshot)
                    return True
        return False

    def _fill(self, entry: _Entry, image: Image, time_s: float) -> None:
        self.count += 1
        try:
            entry.built = _Builder(self, image, time.monotonic() + time_s).build()
        except BuildFailed as error:
            entry.error = error
        except RollartError as error:
            entry.error = error
            with self._lock:
                self._entries.pop(image.digest, None)
        except BaseException:
            entry.error = SandboxFault(f"the build of {_name(image)} was interrupted")
            with self._lock:
                self._entries.pop(image.digest, None)
            raise
        finally:
            entry.ready.set()


class _Builder:
    """One build."""

    def __init__(self, builds: Builds, image: Image, deadline: float) -> None:
        self._builds = builds
        self._image = image
        self._deadline = deadline
        self._env = {"PATH": PATH}
        self._workdir = "/"
        self._user = "root"
        self._below: list[str] = []
        """Snapshots that the last one lies upon."""
        self._sandbox = self._create(None)

    def build(self) -> Built:
        try:
            self._prepare()
            for step in self._image.file.steps:
                self._do(step)
            return Built(self._snapshot(), tuple(self._env.items()), self._workdir, self._user)
        finally:
            self._sandbox.close()
            for snapshot in self._below:
                self._builds.sandboxes.forget(snapshot)

    def _create(self, snapshot: str | None) -> Sandbox:
        limits = Limits(memory_mb=MEMORY_MB, disk_mb=DISK_MB, processes=PROCESSES, files=FILES)
        root = self._user in ROOT_USERS
        spec = SandboxSpec(base=self._image.base.folder, limits=limits, workdir="/", root=root)
        return self._builds.sandboxes.create(spec, snapshot=snapshot, once=True)

    def _prepare(self) -> None:
        self._shell(f"mkdir -p {FOLDERS}; chmod 777 /logs/*", "FROM")
        if self._image.base.python:
            self._env["PATH"] = f"{PATH}:{ALIASES}"
            link = f'mkdir -p {ALIASES} && ln -s "$(command -v python3)" {ALIASES}/python'
            self._shell(f"command -v python || {{ command -v python3 && {link}; }}", "FROM")

    def _do(self, step: Step) -> None:
        where = f"line {step.line}: {step.name}"
        match step:
            case Run(_, command):
                self._checked(self._run(command), f"{where} {command[-1][:200]}")
            case Workdir(_, path):
                folder = posixpath.normpath(posixpath.join(self._workdir, self._expanded(path)))
                self._shell(f"mkdir -p {shlex.quote(folder)}", where)
                self._workdir = folder
            case Env(_, values):
                self._env |= {name: self._expanded(value) for name, value in values}
            case User(_, user):
                self._become(self._expanded(user).partition(":")[0])
            case Copy():
                self._copy(step, where)

    def _become(self, user: str) -> None:
        """A sandbox has one user, so another one goes on from where this one is."""
        before, self._user = self._user, user
        if (before in ROOT_USERS) == (user in ROOT_USERS):
            return
        self._below.append(self._snapshot())
        self._sandbox.close()
        self._sandbox = self._create(self._below[-1])

    def _snapshot(self) -> str:
        try:
            return self._builds.snapshot(self._sandbox)
        except SandboxFileError as error:
            raise self._failed("its files", f"cannot be kept: {error}") from error

    def _copy(self, step: Copy, where: str) -> None:
        target = self._expanded(step.target)
        into = target.endswith("/") or target in (".", "..")
        target = posixpath.normpath(posixpath.join(self._workdir, target))
        sources = [path for pattern in step.sources for path in self._sources(self._expanded(pattern), where)]
        if len(sources) > 1 and not into:
            raise self._failed(where, "copies several files to a target that does not end with /")
        try:
            for source in sources:
                if source.is_dir():
                    self._shell(f"mkdir -p {shlex.quote(target)}", where)
                    self._sandbox.upload(source, target)
                    continue
                path = posixpath.join(target, source.name) if into or self._is_folder(target) else target
                self._sandbox.write_file(path, source.read_bytes(), executable=bool(source.stat().st_mode & 0o100))
        except SandboxFileError as error:
            raise self._failed(where, str(error)) from error

    def _is_folder(self, path: str) -> bool:
        return self._run(("/bin/sh", "-c", f"test -d {shlex.quote(path)}")).ok

    def _sources(self, pattern: str, where: str) -> list[Path]:
        context = self._image.context
        pattern = posixpath.normpath(pattern.lstrip("/") or ".")
        if pattern.startswith(".."):
            raise self._failed(where, f"{pattern} is outside of {context.name}")
        found = [context] if pattern == "." else sorted(context.glob(pattern))
        if not found:
            raise self._failed(where, f"there is no {pattern} in {context.name}")
        return found

    def _expanded(self, text: str) -> str:
        return expanded(text, self._env)

    def _shell(self, script: str, where: str) -> None:
        self._checked(self._run(("/bin/sh", "-c", script)), where)

    def _run(self, command: tuple[str, ...]) -> ExecResult:
        left_s = max(0.1, self._deadline - time.monotonic())
        cwd = self._workdir if self._workdir != "/" else None
        return self._sandbox.exec(command, env=self._env, cwd=cwd, time_s=left_s)

    def _checked(self, result: ExecResult, where: str) -> None:
        if result.ok:
            return
        over = f", over its limit of {', '.join(result.exceeded)}" if result.exceeded else ""
        ended = f"exit code {result.exit_code}" if result.exit_code is not None else f"signal {result.signal}"
        output = (result.stdout + result.stderr).decode(errors="replace").strip()[-OUTPUT_CHARS:]
        network = "; builds have no network" if any(word in where for word in _NETWORK) else ""
        if "Read-only file system" in output:
            network += "; /usr is the machine's own, read-only, unless a root is named for the image"
        raise self._failed(where, f"ended with {ended}{over}{network}: {output or 'no output'}")

    def _failed(self, where: str, why: str) -> BuildFailed:
        return BuildFailed(f"{_name(self._image)}, {where} {why}")


def _name(image: Image) -> str:
    return f"{image.context.parent.name}/{image.context.name}/Dockerfile"


_lock = threading.Lock()
_shared: dict[str, Builds] = {}


def shared_builds(factory: str) -> Builds:
    """The builds of this process in the sandboxes that `factory` makes; they end with their source."""
    source = shared_sandboxes(factory)
    with _lock:
        builds = _shared.get(factory)
        if builds is None or builds.sandboxes is not source:
            builds = _shared[factory] = Builds(source)
        return builds
