"""Sandboxes by gVisor (`runsc`, ptrace platform): another kernel in user space between the agent and the machine.

For a smoke set, to compare with: the files of a sandbox are tmpfs folders (/work, /tmp, home) over /usr of the
machine, and there are no snapshots, no background processes and no limits of memory, processes and files. They outlive
a worker that is killed. Needs root and Debian's `runsc`.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from rollart.backends.sandboxes.folders import receive_folder
from rollart.backends.sandboxes.output import CHUNK_BYTES, Output
from rollart.ports.sandbox import MAX_DOWNLOAD_BYTES, MAX_DOWNLOAD_FILES, MAX_READ_BYTES, OnOutput
from rollart.types.errors import SandboxFault, SandboxFileError, SandboxLost, SandboxUnavailable
from rollart.types.sandboxes import HOST_BASE, ExecResult, Mechanism, SandboxSpec

START_S = 60.0
ENDING_S = 30.0
"""Time for killed processes to be gone; after that the sandbox is given up."""
NOBODY = "65534:65534"
HOME = "/home/agent"
# Without `stat` and `ls`: Debian's runsc refuses the statx of newer coreutils.
READ = 'test -f "$1" || { echo "no regular file" >&2; exit 3; }; head -c "$2" < "$1"'
WRITE = 'test ! -d "$1" && mkdir -p "$(dirname "$1")" && cat > "$1" && chmod "$2" "$1"'
PACK = 'cd "$1" && find . -mindepth 1 \\( -type d -o -type f \\) -printf "%P\\0" | tar -c --null --no-recursion -T -'


class GvisorSandboxes:
    def __init__(self) -> None:
        if shutil.which("runsc") is None or os.geteuid() != 0:
            raise SandboxUnavailable("gVisor sandboxes need root and runsc; install it with: make sandbox-tools")
        self._folder = Path(tempfile.mkdtemp(prefix="rollart-gvisor-"))
        root = self._folder / "root"
        for name in ("usr", "proc", "dev", "tmp", "work", "home/agent", "etc"):
            (root / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")
        self._made: list[GvisorSandbox] = []

    def create(
        self,
        spec: SandboxSpec,
        *,
        snapshot: str | None = None,
        deadline_s: float = 60.0,
        once: bool = False,  # noqa: ARG002 - none is kept ready
    ) -> "GvisorSandbox":
        if snapshot is not None or spec.base != HOST_BASE:
            raise SandboxUnavailable("gVisor sandboxes have the base 'host', and no snapshots")
        if spec.sockets or spec.read_only or spec.root:
            raise SandboxUnavailable("gVisor sandboxes have no mounted sockets or folders, and no user root")
        made = GvisorSandbox(self._folder, spec, deadline_s)
        self._made.append(made)
        return made

    def forget(self, snapshot: str) -> None:
        """There are none."""

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (
            Mechanism("isolation", True, "gVisor, ptrace platform, without network"),
            Mechanism("memory, processes, disk", False, "not limited by this implementation"),
        )

    def close(self) -> None:
        for made in self._made:
            made.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class GvisorSandbox:
    def __init__(self, folder: Path, spec: SandboxSpec, deadline_s: float) -> None:
        self._folder, self._spec = folder, spec
        self._lock = threading.Lock()
        self._closed = False
        self.name = ""
        self._start(deadline_s)

    # --- life -------------------------------------------------------------------------------------------------------

    def _start(self, deadline_s: float) -> None:
        self.name = f"rollart-{uuid4().hex[:12]}"
        bundle = self._folder / self.name
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(self._config()))
        try:
            # Its output goes to a file, because the sandbox would keep a pipe open.
            with (bundle / "log").open("wb") as log:
                folder, process = str(bundle), str(bundle / "pid")
                arguments = ("run", "--detach", "--bundle", folder, "--pid-file", process, self.name)
                self._runsc(*arguments, output=log, wait_s=deadline_s)
        except (subprocess.SubprocessError, OSError) as error:
            said = (bundle / "log").read_text(errors="replace")[-300:]
            self._remove()
            raise SandboxFault(f"gVisor sandbox {self.name} could not be created: {said or error}") from None

    def _config(self) -> dict[str, Any]:
        writable = {"mode": "0777", "size": f"{self._spec.limits.disk_mb}m"}
        options = ["nosuid", "nodev", *(f"{name}={value}" for name, value in writable.items())]
        folders = dict.fromkeys((self._spec.workdir, "/tmp", HOME))
        tmpfs = [{"destination": path, "type": "tmpfs", "source": "tmpfs", "options": options} for path in folders]
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 65534, "gid": 65534},
                "args": ["/usr/bin/sleep", "infinity"],
                "env": ["PATH=/usr/bin"],
                "cwd": "/",
                "noNewPrivileges": True,
                "capabilities": {},
            },
            "root": {"path": str(self._folder / "root"), "readonly": True},
            "hostname": "sandbox",
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["ro", "rbind"]},
                *tmpfs,
            ],
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
        }

    def _runsc(self, *arguments: str, output: Any = subprocess.DEVNULL, wait_s: float = START_S) -> None:
        command = self._command(*arguments)
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=wait_s, check=True)

    def _command(self, *arguments: str) -> list[str]:
        flags = ("--platform=ptrace", "--network=none", "--ignore-cgroups")
        return ["runsc", "--root", str(self._folder / "state"), *flags, *arguments]

    def _remove(self) -> None:
        subprocess.run(self._command("delete", "--force", self.name), capture_output=True, timeout=START_S, check=False)
        shutil.rmtree(self._folder / self.name, ignore_errors=True)

    def snapshot(self) -> str:
        raise SandboxUnavailable("gVisor sandboxes have no snapshots")

    def reset(self, snapshot: str | None = None) -> None:
        if snapshot is not None:
            raise SandboxUnavailable("gVisor sandboxes have no snapshots")
        with self._lock:
            self._remove()
            self._start(START_S)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._remove()

    # --- commands ---------------------------------------------------------------------------------------------------

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
        if keep_background:
            raise SandboxUnavailable("gVisor sandboxes keep nothing in the background")
        limits = self._spec.limits
        outputs = {name: Output(limits.output_kb * 1024) for name in ("stdout", "stderr")}

        def keep(name: str, chunk: bytes) -> None:
            part = outputs[name].add(chunk)
            if part and on_output is not None:
                on_output(name, part)

        began = time.monotonic()
        limit_s = limits.time_s if time_s is None else time_s
        code, timed_out = self._run(command, stdin, env or {}, self._path(cwd or "."), limit_s, keep)
        return ExecResult(
            exit_code=code,
            stdout=outputs["stdout"].bytes(),
            stderr=outputs["stderr"].bytes(),
            stdout_dropped=outputs["stdout"].dropped,
            stderr_dropped=outputs["stderr"].dropped,
            timed_out=timed_out,
            seconds=time.monotonic() - began,
        )

    def _run(
        self, command: Sequence[str], stdin: bytes, env: Mapping[str, str], cwd: str, limit_s: float, keep: OnOutput
    ) -> tuple[int | None, bool]:
        """Exit code, and whether the limit of time ended it."""
        variables = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": HOME,
            "LANG": "C.UTF-8",
            **dict(self._spec.env),
            **env,
        }
        # `env` looks the program up and ends with 126 or 127 like a shell, which `runsc exec` does not.
        words = ["env", "-i", "-C", cwd, *(f"{name}={value}" for name, value in variables.items()), *command]
        arguments = ("exec", "--user", NOBODY, "--cwd", "/", self.name, *words)
        with self._lock, tempfile.TemporaryFile() as content:
            if self._closed:
                raise SandboxLost(f"sandbox {self.name} was closed")
            content.write(stdin)
            content.seek(0)
            pipes = {"stdin": content, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            with subprocess.Popen(self._command(*arguments), **pipes) as process:  # type: ignore[call-overload]
                streams = {"stdout": process.stdout, "stderr": process.stderr}
                readers = [threading.Thread(target=_read, args=(name, streams[name], keep)) for name in streams]
                for reader in readers:
                    reader.start()
                timed_out = False
                try:
                    process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    timed_out = True
                self._kill_all()
                for reader in readers:
                    reader.join(ENDING_S)
                if any(reader.is_alive() for reader in readers):
                    self._kill_kernel()  # it keeps the pipes open
                    process.kill()
                    self._remove()
                    for reader in readers:
                        reader.join()
                    raise SandboxLost(f"sandbox {self.name} was lost: its processes do not end, although killed")
                process.wait()
            if process.returncode < 0 or (process.returncode and not self._alive()):
                raise SandboxLost(f"sandbox {self.name} was lost: its kernel has ended; reset it, or create another")
            return process.returncode, timed_out

    def _kill_kernel(self) -> None:
        """For one that does not answer: `runsc delete` waits for it."""
        with suppress(OSError, ValueError):
            os.kill(int((self._folder / self.name / "pid").read_text()), signal.SIGKILL)

    def _kill_all(self) -> None:
        """Everything in the sandbox but its first process, and what a command left behind."""
        kill = self._command("exec", "--user", NOBODY, self.name, "/usr/bin/env", "sh", "-c", "kill -9 -1")
        with suppress(subprocess.TimeoutExpired):  # its output then stays open, which is noticed
            subprocess.run(kill, stdin=subprocess.DEVNULL, capture_output=True, timeout=ENDING_S, check=False)

    def _alive(self) -> bool:
        state = subprocess.run(self._command("state", self.name), capture_output=True, timeout=START_S, check=False)
        return state.returncode == 0 and json.loads(state.stdout).get("status") == "running"

    def _path(self, path: str) -> str:
        return path if path.startswith("/") else os.path.join(self._spec.workdir, path)

    # --- files ------------------------------------------------------------------------------------------------------

    def _script(self, script: str, *arguments: str, stdin: bytes = b"") -> bytes:
        """Output of a script of ours; what fails in it is a wrong path."""
        chunks: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        command = ["sh", "-c", script, "sh", *arguments]
        code, timed_out = self._run(command, stdin, {}, "/", START_S, lambda name, chunk: chunks[name].append(chunk))
        if code or timed_out:
            raise SandboxFileError(f"{arguments[0]}: {b''.join(chunks['stderr']).decode(errors='replace')[:300]}")
        return b"".join(chunks["stdout"])

    def read_file(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        content = self._script(READ, self._path(path), str(max_bytes + 1))
        if len(content) > max_bytes:
            raise SandboxFileError(f"{path} has more than {max_bytes} bytes")
        return content

    def write_file(self, path: str, content: bytes, *, executable: bool = False) -> None:
        self._script(WRITE, self._path(path), "755" if executable else "644", stdin=content)

    def upload(self, source: Path, target: str) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for entry in sorted(source.iterdir()):
                archive.add(entry, entry.name)
        script = 'mkdir -p "$1" && tar -x --no-same-owner -C "$1"'
        self._script(script, self._path(target), stdin=packed.getvalue())

    def download(
        self,
        source: str,
        target: Path,
        *,
        max_bytes: int = MAX_DOWNLOAD_BYTES,
        max_files: int = MAX_DOWNLOAD_FILES,
    ) -> None:
        packed = self._script(PACK, self._path(source))
        with (
            receive_folder(target, max_bytes=max_bytes, max_files=max_files) as descriptor,
            open(os.dup(descriptor), "wb") as pipe,
        ):
            pipe.write(packed)


def _read(name: str, stream: io.BufferedReader, keep: OnOutput) -> None:
    while chunk := stream.read1(CHUNK_BYTES):
        keep(name, chunk)
