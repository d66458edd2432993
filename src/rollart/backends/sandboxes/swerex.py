"""Client of the SWE-ReX wire (swe-rex 1.4): sandboxes that run elsewhere, each a server that somebody started.

    POST /execute, /upload, /create_session, /run_in_session, /close_session   with the header X-API-Key

Isolation and limits are those of the place where the server runs; this side limits time and size of output, and decides
what is a result and what a failure. What the wire does not carry is refused by name: snapshots, background processes,
mounts, sockets.

Differences that come with the wire: output is text, so bytes that are no UTF-8 arrive escaped, and it travels before it
is cut; a command that a signal ended has an exit code of 128 and more. Files travel by `/execute` (base64) and
`/upload`, because `/read_file` and `/write_file` carry text only. `session` opens a shell that keeps its state.
"""

import base64
import binascii
import io
import json
import os
import shlex
import shutil
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from rollart.backends.sandboxes.launcher.transfer import Unreasonable, check_path
from rollart.backends.sandboxes.output import Output
from rollart.ports.sandbox import MAX_DOWNLOAD_BYTES, MAX_DOWNLOAD_FILES, MAX_READ_BYTES, OnOutput
from rollart.types.errors import SandboxFault, SandboxFileError, SandboxLost, SandboxUnavailable
from rollart.types.failures import FailureKind
from rollart.types.sandboxes import ExecResult, Limits, Mechanism, SandboxSpec

GRACE_S = 30.0
REQUEST_S = 120.0
SESSION_S = 10.0
BASH = {"session_type": "bash"}
KILLED = (137, -9)
"""Exit codes of `timeout -s KILL` for a command that it killed; it may kill itself along."""
# Arguments: file with the input, limit of time, command.
RUN = 'input=$1; limit=$2; shift 2; exec timeout -s KILL "$limit" "$@" < "$input"'
READ = """
test -f "$1" || { echo "no regular file" >&2; exit 3; }
test $(stat -L -c %s "$1") -le $2 || exit 4
base64 -w0 "$1"
"""
LIST = 'cd "$1" && find . -mindepth 1 \\( -type d -printf "d 0 %P\\0" -o -type f -printf "f %s %P\\0" \\) | base64 -w0'


class Endpoint:
    """One server."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self._token = url.rstrip("/"), token

    def post(self, route: str, body: Mapping[str, Any], wait_s: float = REQUEST_S) -> dict[str, Any]:
        data = json.dumps(body).encode()
        return self._send(route, data, {"Content-Type": "application/json"}, wait_s)

    def upload(self, target: str, content: bytes, *, unzip: bool) -> None:
        """As a multipart form, the way the wire has it."""
        boundary = uuid4().hex
        fields = {"target_path": target, "unzip": str(unzip).lower()}
        parts = [
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
            for name, value in fields.items()
        ]
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="file"\r\n\r\n'.encode()
        data = b"".join([*parts, head, content, f"\r\n--{boundary}--\r\n".encode()])
        self._send("upload", data, {"Content-Type": f"multipart/form-data; boundary={boundary}"}, REQUEST_S)

    def _send(self, route: str, data: bytes, headers: Mapping[str, str], wait_s: float) -> dict[str, Any]:
        # The id lets the server recognise a repeated request; none is repeated here, because commands have effects.
        every = {"X-API-Key": self._token, "X-Request-ID": uuid4().hex}
        request = urllib.request.Request(f"{self.url}/{route}", data, {**headers, **every}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=wait_s) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise self._refused(route, error) from None
        except TimeoutError:
            raise SandboxLost(f"{self.url}/{route} did not answer within {wait_s:g} s", FailureKind.DEADLINE) from None
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise SandboxLost(f"{self.url}/{route} cannot be reached: {error}") from None
        if not isinstance(answer, dict):
            raise SandboxFault(f"{self.url}/{route} answered with no object", FailureKind.INVALID)
        return answer

    def _refused(self, route: str, error: urllib.error.HTTPError) -> Exception:
        text = error.read(2000).decode(errors="replace")
        if error.code in (401, 403) or "Invalid API Key" in text:
            return SandboxUnavailable(f"{self.url} refuses the token; give the one that its server was started with")
        return SandboxFault(f"{self.url}/{route} failed with {error.code}: {text[:300]}")


class SweRexSandboxes:
    """Servers at given URLs; each is one sandbox at a time."""

    def __init__(self, urls: Sequence[str], token: str) -> None:
        self._endpoints = [Endpoint(url, token) for url in urls]
        self._free = list(self._endpoints)
        self._changed = threading.Condition()
        self._closed = False

    def create(
        self,
        spec: SandboxSpec,
        *,
        snapshot: str | None = None,
        deadline_s: float = 60.0,
        once: bool = False,  # noqa: ARG002 - none is kept ready
    ) -> "SweRexSandbox":
        """The limits of a spec are not enforced by this wire, except time and output; its `base` is the server's."""
        if snapshot is not None or spec.sockets or spec.read_only:
            raise SandboxUnavailable("a SWE-ReX service has no snapshots, mounted sockets or folders")
        endpoint = self._lease(time.monotonic() + deadline_s, deadline_s)
        try:
            return SweRexSandbox(self, endpoint, spec)
        except BaseException:
            self.give_back(endpoint)
            raise

    def _lease(self, deadline: float, deadline_s: float) -> Endpoint:
        with self._changed:
            while self._closed or not self._free:
                left = deadline - time.monotonic()
                if self._closed:
                    raise SandboxFault("the source of SWE-ReX servers was closed")
                if left <= 0:
                    raise SandboxFault(f"no SWE-ReX server was free within {deadline_s:g} s", FailureKind.DEADLINE)
                self._changed.wait(left)
            return self._free.pop(0)

    def give_back(self, endpoint: Endpoint) -> None:
        with self._changed:
            self._free.append(endpoint)
            self._changed.notify()

    def forget(self, snapshot: str) -> None:
        """There are none."""

    def mechanisms(self) -> tuple[Mechanism, ...]:
        text = f"those of {len(self._endpoints)} SWE-ReX servers; here only time and output are limited"
        return (Mechanism("isolation and limits", False, text),)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class SweRexSandbox:
    """One leased server."""

    def __init__(self, source: SweRexSandboxes, endpoint: Endpoint, spec: SandboxSpec) -> None:
        self._source, self._endpoint, self._spec = source, endpoint, spec
        self._limits: Limits = spec.limits
        self.name = f"{endpoint.url}#{uuid4().hex[:8]}"
        self._scratch = f"/tmp/rollart-{uuid4().hex}"
        self._lock = threading.Lock()
        self._closed = False
        self._leased = True
        self._clean()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """One at a time. A server is not given back while it may still run the command of a closed sandbox."""
        try:
            with self._lock:
                self._check_open()
                yield
                self._check_open()
        finally:
            self._give_back()

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxLost(f"sandbox {self.name} was closed")

    def _give_back(self) -> None:
        """If it was closed and nothing is under way; else the call that is under way gives it back."""
        if self._closed and self._lock.acquire(blocking=False):
            leased, self._leased = self._leased, False
            self._lock.release()
            if leased:
                self._source.give_back(self._endpoint)

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
            raise SandboxUnavailable("a SWE-ReX service does not keep processes in the background")
        limit_s = self._limits.time_s if time_s is None else time_s
        with self._call():
            self._endpoint.upload(f"{self._scratch}/input", stdin, unzip=False)
            variables = [f"{name}={value}" for name, value in (*self._spec.env, *(env or {}).items())]
            began = time.monotonic()
            arguments = [f"{self._scratch}/input", f"{limit_s:f}", "env", *variables, *command]
            answer = self._run(RUN, *arguments, cwd=self._path(cwd or "."), wait_s=limit_s + GRACE_S)
            seconds = time.monotonic() - began
        streams = {}
        for name in ("stdout", "stderr"):
            kept = Output(self._limits.output_kb * 1024)
            part = kept.add(answer[name].encode())
            if part and on_output is not None:
                on_output(name, part)
            streams[name] = (kept.bytes(), kept.dropped)
        code = answer["exit_code"]
        timed_out = code in KILLED and seconds >= limit_s
        return ExecResult(
            exit_code=None if code < 0 else code,
            signal=-code if code < 0 else None,
            stdout=streams["stdout"][0],
            stderr=streams["stderr"][0],
            stdout_dropped=streams["stdout"][1],
            stderr_dropped=streams["stderr"][1],
            timed_out=timed_out,
            seconds=seconds,
        )

    def _run(self, script: str, *arguments: str, cwd: str | None = None, wait_s: float = REQUEST_S) -> dict[str, Any]:
        """A script of ours with arguments, as part of a call."""
        body = {"command": ["sh", "-c", script, "sh", *arguments], "shell": False, "cwd": cwd, "timeout": None}
        answer = self._endpoint.post("execute", body, wait_s)
        if not isinstance(answer.get("exit_code"), int):
            raise SandboxFault(f"{self.name} answered without an exit code", FailureKind.INVALID)
        return answer

    def read_file(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        with self._call():
            return self._read(self._path(path), max_bytes)

    def _read(self, path: str, max_bytes: int) -> bytes:
        """Over `/execute`: `/read_file` carries text only."""
        answer = self._run(READ, path, str(max_bytes))
        if answer["exit_code"] == 4:
            raise SandboxFileError(f"{path} has more than {max_bytes} bytes")
        if answer["exit_code"] != 0:
            raise SandboxFileError(f"{path}: {answer['stderr'].strip()[:300]}")
        try:
            return base64.b64decode(answer["stdout"], validate=True)
        except binascii.Error as error:
            raise SandboxFault(f"{self.name} answered with a damaged file: {error}", FailureKind.INVALID) from None

    def write_file(self, path: str, content: bytes, *, executable: bool = False) -> None:
        full = self._path(path)
        with self._call():
            if self._run('test ! -d "$1" && mkdir -p "$(dirname "$1")"', full)["exit_code"] != 0:
                raise SandboxFileError(f"{full} is a folder, or cannot be made")
            self._endpoint.upload(full, content, unzip=False)
            if executable:
                self._run('chmod 755 "$1"', full)

    def upload(self, source: Path, target: str) -> None:
        packed = io.BytesIO()
        programs = []
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(source.rglob("*")):
                archive.write(path, str(path.relative_to(source)))
                if path.is_file() and os.access(path, os.X_OK):
                    programs.append(str(path.relative_to(source)))
        full = self._path(target)
        with self._call():
            self._endpoint.upload(full, packed.getvalue(), unzip=True)
            if programs:  # zipfile does not restore modes
                self._run('cd "$1" && shift && chmod 755 -- "$@"', full, *programs)

    def download(
        self,
        source: str,
        target: Path,
        *,
        max_bytes: int = MAX_DOWNLOAD_BYTES,
        max_files: int = MAX_DOWNLOAD_FILES,
    ) -> None:
        if target.exists():
            raise SandboxFileError(f"{target} exists; a download makes a new folder")
        full = self._path(source)
        draft = target.with_name(f".{target.name}-{uuid4().hex[:8]}.draft")
        with self._call():
            answer = self._run(LIST, full)
            if answer["exit_code"] != 0 or answer["stderr"]:
                raise SandboxFileError(f"{full}: {answer['stderr'].strip()[:300]}")
            entries = base64.b64decode(answer["stdout"]).decode(errors="surrogateescape").split("\0")[:-1]
            listed = [entry.split(" ", 2) for entry in entries]
            if len(listed) > max_files or sum(int(size) for _, size, _ in listed) > max_bytes:
                raise SandboxFileError(f"a download has more than {max_files} files or {max_bytes} bytes")
            try:
                draft.mkdir()
                for kind, _, name in listed:
                    self._receive(kind, f"{full}/{name}", draft, name, max_bytes)
                draft.rename(target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)

    def _receive(self, kind: str, path: str, draft: Path, name: str, max_bytes: int) -> None:
        if name.startswith("/") or ".." in name.split("/"):
            raise SandboxFileError(f"a download contains {name!r}, which is no plain name")
        try:
            check_path(name)
        except Unreasonable as error:
            raise SandboxFileError(f"{path}: {error}") from None
        if kind == "d":
            (draft / name).mkdir(parents=True, exist_ok=True)
        else:
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_bytes(self._read(path, max_bytes))

    def session(self) -> "SweRexSession":
        """A shell that keeps its directory, variables and functions between commands."""
        return SweRexSession(self._endpoint, self._spec)

    def snapshot(self) -> str:
        raise SandboxUnavailable("a SWE-ReX service has no snapshots")

    def reset(self, snapshot: str | None = None) -> None:
        """Empty the working directory. What was written elsewhere stays: for more, start another server."""
        if snapshot is not None:
            raise SandboxUnavailable("a SWE-ReX service has no snapshots")
        with self._call():
            self._clean()

    def _clean(self) -> None:
        script = 'rm -rf -- "$1" && mkdir -p "$1" "$2"'
        answer = self._run(script, self._spec.workdir, self._scratch)
        if answer["exit_code"] != 0:
            raise SandboxFault(f"{self.name} could not empty {self._spec.workdir}: {answer['stderr'].strip()[:300]}")

    def _path(self, path: str) -> str:
        return path if path.startswith("/") else os.path.join(self._spec.workdir, path)

    def close(self) -> None:
        """A command under way goes on within its limit of time, and the server is free after it."""
        self._closed = True
        self._give_back()


class SweRexSession:
    """A Bash session of a server. Its exit codes are what the shell prints, and so is no observation from outside."""

    def __init__(self, endpoint: Endpoint, spec: SandboxSpec) -> None:
        self._endpoint = endpoint
        self._name = uuid4().hex
        self._time_s = spec.limits.time_s
        endpoint.post("create_session", {"session": self._name, "startup_timeout": SESSION_S} | BASH)
        exports = [f"export {shlex.quote(f'{name}={value}')}" for name, value in spec.env]
        self.run("; ".join([f"cd {shlex.quote(spec.workdir)}", *exports]))

    def run(self, command: str, time_s: float | None = None) -> tuple[str, int]:
        """Output of both streams together, and exit code."""
        limit_s = self._time_s if time_s is None else time_s
        body = {"session": self._name, "command": command, "timeout": limit_s, "check": "silent", "action_type": "bash"}
        answer = self._endpoint.post("run_in_session", body, limit_s + GRACE_S)
        if not isinstance(answer.get("exit_code"), int):
            raise SandboxFault(f"{self._endpoint.url} answered without an exit code", FailureKind.INVALID)
        return str(answer.get("output", "")), answer["exit_code"]

    def close(self) -> None:
        self._endpoint.post("close_session", {"session": self._name} | BASH)
