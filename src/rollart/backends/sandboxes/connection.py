"""The worker's side of the launcher: its process, and the control sockets of sandboxes."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollart.backends.sandboxes.launcher import wire
from rollart.backends.sandboxes.output import CHUNK_BYTES, Output
from rollart.types.errors import SandboxFault, SandboxLost, SandboxUnavailable
from rollart.types.failures import FailureKind

SOURCE = Path(__file__).parents[3]
"""Folder that the launcher imports its code from."""
INTERPRETER = sys.executable
HELLO_S = 60.0
CLOSE_S = 60.0
GRACE_S = 30.0
"""Beyond its own limits a supervisor may take this long for an answer; then it is given up."""
CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from rollart.backends.sandboxes.launcher.main import main; main(int(sys.argv[2]), sys.argv[3])"
)
ALLOW = """allow them, or use another machine:
  Debian, Ubuntu   sysctl -w kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0
  any Linux        sysctl -w user.max_user_namespaces=10000
  Docker           --security-opt seccomp=unconfined --security-opt systempaths=unconfined, or --privileged"""


class LauncherProcess:
    """One launcher. Sandboxes of it end with it."""

    def __init__(self, parent: Path, as_user: int | None = None) -> None:
        if shutil.which("bwrap") is None:
            raise SandboxUnavailable(
                "sandboxes need bubblewrap (bwrap), which is not installed; install it with: make sandbox-tools, "
                "or apt-get install bubblewrap"
            )
        self._lock = threading.Lock()
        self._socket, theirs = wire.pair()
        # Isolated, without site packages and without an environment: nothing of the worker reaches it.
        user = {} if as_user is None else {"user": as_user, "group": as_user, "extra_groups": []}
        with theirs:
            self._process = subprocess.Popen(
                [INTERPRETER, "-I", "-S", "-c", CODE, str(SOURCE), str(theirs.fileno()), str(parent)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
                start_new_session=True,
                cwd="/",
                **user,  # type: ignore[call-overload]
            )
        self._socket.settimeout(HELLO_S)
        try:
            hello = self._receive_hello()
        except BaseException:
            self.close()
            raise
        self.about: Mapping[str, Any] = hello
        self.work = Path(hello["work"])
        self._count = 0

    def _receive_hello(self) -> dict[str, Any]:
        try:
            received = wire.receive(self._socket)
        except TimeoutError:
            raise SandboxFault("the launcher of sandboxes did not start in time", FailureKind.DEADLINE) from None
        if received is None:
            raise SandboxFault("the launcher of sandboxes died at its start; its error is on stderr")
        if "unavailable" in received[0]:
            raise SandboxUnavailable(f"sandboxes need user namespaces: {received[0]['unavailable']}; {ALLOW}")
        return received[0]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def open(self, order: dict[str, Any], wait_s: float) -> "Connection":
        """Make a sandbox; if it is not ready in time, it is removed as soon as it is."""
        ours, theirs = wire.pair()
        with theirs, self._lock:
            self._count += 1
            name = f"{self.work.name}.{self._count}"
            try:
                wire.send(self._socket, order | {"name": name}, [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise SandboxFault(f"the launcher of sandboxes is gone ({error.strerror})") from None
        connection = Connection(name, ours)
        try:
            connection.wait_ready(wait_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Returns when all sandboxes of it are removed; their connections have to be closed before."""
        self._socket.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            # The kernel tells its supervisors, which remove their sandboxes.
            self._process.kill()
            self._process.wait()


class Connection:
    """The control socket of one running sandbox. Used by one thread at a time, except `close`."""

    def __init__(self, name: str, control: socket.socket) -> None:
        self.name = name
        self._control = control
        self._closed = False
        self.process = 0
        """The keeper's, on this machine."""

    def wait_ready(self, wait_s: float) -> None:
        answer, _ = self._receive(wait_s)
        if "failed" in answer:
            raise SandboxFault(f"sandbox {self.name} could not be created: {answer['failed']}")
        self.process = answer["ready"]

    @property
    def open(self) -> bool:
        """Whether it can be used, as far as known."""
        if self._closed:
            return False
        return not wire.wait([self._control.fileno()], 0)  # unasked, a supervisor says only that its sandbox was killed

    def call(
        self, order: Mapping[str, Any], descriptors: Sequence[int], wait_s: float
    ) -> tuple[dict[str, Any], list[int]]:
        self.post(order, descriptors)
        return self._receive(wait_s)

    def post(self, order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Send without waiting. If the other side is gone, receiving says why."""
        with suppress(OSError):
            wire.send(self._control, order, descriptors)

    def _receive(self, wait_s: float) -> tuple[dict[str, Any], list[int]]:
        try:
            readable = wire.wait([self._control.fileno()], wait_s)
            received = wire.receive(self._control) if readable else ({}, [])
        except (OSError, ValueError):
            received = None  # closed by another thread
        if received is None:
            raise self._lost("it was closed" if self._closed else "its supervisor was killed")
        if not received[0] and not readable:
            self.close()
            raise self._lost(f"its supervisor did not answer within {wait_s:g} s")
        if "lost" in received[0]:
            raise self._lost(received[0]["lost"])
        return received

    def _lost(self, why: str) -> SandboxLost:
        return SandboxLost(f"sandbox {self.name} was lost: {why}; reset it, or create another")

    def run(
        self,
        order: Mapping[str, Any],
        stdin: int,
        limit_bytes: int,
        on_output: Callable[[str, bytes], None] | None,
    ) -> tuple[dict[str, Any], Output, Output]:
        """A command: its answer, and what it wrote."""
        outputs = {"stdout": Output(limit_bytes), "stderr": Output(limit_bytes)}
        pipes = {name: os.pipe() for name in outputs}
        readers = {pipes[name][0]: name for name in outputs}
        try:
            try:
                self.post(order, [stdin, *(pipe[1] for pipe in pipes.values())])
            finally:
                wire.close(*(pipe[1] for pipe in pipes.values()))
            for reader in readers:
                os.set_blocking(reader, False)
            answer = self._pump(readers, outputs, order["time_s"] + GRACE_S, on_output)
        except SandboxLost:
            raise
        except BaseException:
            self.close()  # the answer is still to come, and would be taken for that of the next call
            raise
        finally:
            wire.close(*(pipe[0] for pipe in pipes.values()))
        return answer, outputs["stdout"], outputs["stderr"]

    def _pump(
        self,
        readers: Mapping[int, str],
        outputs: Mapping[str, Output],
        wait_s: float,
        on_output: Callable[[str, bytes], None] | None,
    ) -> dict[str, Any]:
        def read(reader: int) -> bool:
            """Whether there may be more."""
            try:
                chunk = os.read(reader, CHUNK_BYTES)
            except BlockingIOError:
                return False
            part = outputs[readers[reader]].add(chunk)
            if part and on_output is not None:
                on_output(readers[reader], part)
            return bool(chunk)

        open_ = set(readers)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                control = self._control.fileno()
                readable = wire.wait([control, *open_], deadline - time.monotonic())
            except (OSError, ValueError):
                raise self._lost("it was closed") from None
            for reader in readers:
                if reader in readable and not read(reader):
                    open_.discard(reader)
            if control in readable or not readable:
                answer, _ = self._receive(0.0)
                for reader in open_:
                    # A process that was kept in the background may write for ever.
                    for _ in range(2**24 // CHUNK_BYTES):
                        if not read(reader):
                            break
                return answer

    def close(self) -> None:
        """The supervisor removes the sandbox when it notices. Interrupts a call in another thread."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()


def sealed_file(content: bytes) -> int:
    """Descriptor of an immutable file in memory."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return descriptor


def check_fits(order: Mapping[str, Any]) -> None:
    if not wire.fits(order):
        size_kb = len(json.dumps(order)) // 1024
        most_kb = wire.MAX_MESSAGE_BYTES // 1024
        raise ValueError(f"the command and its environment have {size_kb} KB, at most {most_kb} KB fit; write a file")
