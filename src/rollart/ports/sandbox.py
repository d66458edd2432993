"""The Sandbox port: run what an agent wrote, contained, with typed results.

    sandboxes.create(spec) → Sandbox ── exec, read, write, upload, download ──► reset ──► … ──► close

Invariants:
- a command has a result (`ExecResult`) whatever it did, over its limits included; only failures outside the agent's
  reach raise `SandboxFault` (`SandboxLost` if it was killed). No command can end its sandbox;
- results are observed from outside: nothing that a command prints or writes changes its exit code or flags;
- after `reset` nothing is left of what ran before: no process, file, socket or shared memory;
- `close`, and the death of the process that created it, leave nothing on the machine.

Methods block and may be called from any thread; a sandbox serves one call at a time, except `close`, which interrupts.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rollart.types.sandboxes import ExecResult, Mechanism, SandboxSpec

OnOutput = Callable[[str, bytes], None]
"""Called with `stdout` or `stderr` and what was just read, up to the limit of output.

An exception of it ends the sandbox, because its command would go on, and is raised by `exec`.
"""

MAX_READ_BYTES = 16 * 2**20
MAX_DOWNLOAD_BYTES = 256 * 2**20
MAX_DOWNLOAD_FILES = 10_000


class Sandbox(Protocol):
    """One isolated machine for the commands of one episode."""

    @property
    def name(self) -> str:
        """Unique on this machine; for messages."""
        ...

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
        """Run a program with its arguments; no shell is involved.

        `env` adds to that of the spec. What the command leaves running is killed when it ends, unless
        `keep_background`: then it runs until the next command without it ends, or until `reset`.
        """
        ...

    def read_file(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Contents of a regular file, as the sandbox's user sees it; raises `SandboxFileError`."""
        ...

    def write_file(self, path: str, content: bytes, *, executable: bool = False) -> None:
        """Write a file as the sandbox's user, creating its folders; raises `SandboxFileError`."""
        ...

    def upload(self, source: Path, target: str) -> None:
        """Copy the contents of a folder of this machine into a folder of the sandbox, which is created if missing."""
        ...

    def download(
        self,
        source: str,
        target: Path,
        *,
        max_bytes: int = MAX_DOWNLOAD_BYTES,
        max_files: int = MAX_DOWNLOAD_FILES,
    ) -> None:
        """Copy regular files and folders below a folder of the sandbox to a new folder of this machine.

        Links and special files are left out: nothing in `target` refers to anything outside of it.
        Raises `SandboxFileError` if there is more than allowed; then `target` does not exist.
        """
        ...

    def snapshot(self) -> str:
        """Keep the files as they are; the id is good for `create` and `reset` until `Sandboxes.forget`.

        Raises `SandboxFileError` if folders are nested so deeply, or paths so long, that they cannot be copied.
        """
        ...

    def reset(self, snapshot: str | None = None) -> None:
        """Start clean: from the base, or from a snapshot. Also revives a sandbox that was lost."""
        ...

    def close(self) -> None:
        """Remove it. Calls under way in other threads raise `SandboxLost`. Closing twice has no effect."""
        ...


class Sandboxes(Protocol):
    """Source of sandboxes; one per worker process."""

    def create(
        self, spec: SandboxSpec, *, snapshot: str | None = None, deadline_s: float = 60.0, once: bool = False
    ) -> Sandbox:
        """A fresh sandbox. `once`: nothing like it will be needed again, so none is kept ready in its place.

        Raises `SandboxUnavailable` if this machine cannot isolate commands, or the spec cannot be met, and
        `SandboxFault` if it was not there by the deadline: one that becomes ready later is used for the next
        `create`, or removed.
        """
        ...

    def forget(self, snapshot: str) -> None:
        """Remove a snapshot; unknown ones are ignored. Sandboxes made from it go on."""
        ...

    def mechanisms(self) -> tuple[Mechanism, ...]:
        """What is enforced here, and how."""
        ...

    def close(self) -> None:
        """Remove all sandboxes and snapshots."""
        ...
