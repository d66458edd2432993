"""An interpreter of its own for the environments of a worker: one child process, which plays them in threads.

    EnvironmentThread ─► RemoteEnvironment ─► Outbox ═ stdin ═►  shim/main: one thread per environment
                      ◄─ SimpleQueue ◄─ reading thread ◄═ stdout ═

Tokenising stays here; text, rewards and failures travel. The process needs no packages of rollart: what it runs is sent
to it as source (`shipping`).

Invariants: every call is answered, by the process or by its death. A process never outlives its worker, nor do the
processes that it started in its group. One that dies is started again for the next episode, after a back-off that grows
with every start that brought no answer. One that has more calls hanging than it has slots is killed, as nothing else
ends a thread.
"""

import base64
import contextlib
import itertools
import logging
import os
import platform
import queue
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollart.backends.environments.shim.main import LENGTH_BYTES, READY, Outbox
from rollart.backends.environments.shipping import LOADER, PACKAGES, shipped_sources, source_of
from rollart.ports.environment import TextStep
from rollart.ports.factory import moves
from rollart.ports.import_paths import project_paths
from rollart.types.errors import EnvironmentFault, RequestError
from rollart.types.trajectory import Prompt

logger = logging.getLogger(__name__)

BOOT = (
    "import os; stream = os.fdopen(os.dup(0), 'rb'); loader = {'__name__': 'rollart_loader'}; "
    "exec(stream.read(int(stream.readline())), loader); loader['start'](stream)"
)
"""The first line of stdin is the length of the loader's source, which follows."""
START_S = 240.0
"""Limit of the start, in which the environment's libraries are imported."""
END_S = 3.0
"""Time for a process to end in order."""
FIRST_BACK_OFF_S = 0.5
LONGEST_BACK_OFF_S = 60.0
TAIL_BYTES = 2000
"""Output of a process that is kept for the report of its death."""
READ_BYTES = 1 << 18
GIVEN_UP = "it was given up before it answered"
NOT_INHERITED = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV")
"""Environment variables that belong to this interpreter."""


class RemoteFailure(EnvironmentFault):
    """An environment in another process failed, or the process did. The message is the whole reason."""

    def __init__(self, reason: str, *, permanent: bool = False) -> None:
        super().__init__(reason)
        self.permanent = permanent


class Failed(NamedTuple):
    """Answer of the process to a call that failed."""

    reason: str
    permanent: bool


class Work(NamedTuple):
    """What to play in an interpreter, by factory path."""

    factory: str
    settings: Mapping[str, Any]
    check: bool = False
    """Build an environment at the start, so that wrong settings are noticed then."""


class Interpreter:
    """Starts processes of `python`, one at a time; used by the threads of all environments."""

    def __init__(self, python: str, work: Work, *, title: str, slots: int) -> None:
        self._python = _executable(python)
        self._work = work
        self._title = title
        self._slots = slots
        self._ids = itertools.count(READY + 1)
        self._lock = threading.Lock()
        """Held while a process is started, so that one thread does."""
        self._closed = threading.Event()
        self._back_off_s = 0.0
        self._process = self._start()

    def build(self) -> "RemoteEnvironment":
        return RemoteEnvironment(self, next(self._ids))

    @property
    def pid(self) -> int:
        """Process id of the latest process."""
        return self._process.pid

    def running(self) -> "HostProcess":
        """The process, started again if it is dead. Raises `RemoteFailure`."""
        with self._lock:
            if self._process.death is None:
                return self._process
            if self._process.answered:
                self._process.answered, self._back_off_s = False, 0.0
            wait_s = self._back_off_s
            self._back_off_s = min(LONGEST_BACK_OFF_S, max(FIRST_BACK_OFF_S, 2 * wait_s))
            if self._closed.wait(wait_s):
                raise RemoteFailure("its worker is closed")
            try:
                self._process = self._start()
            except RequestError as error:
                raise RemoteFailure(str(error)) from error
            return self._process

    def close(self) -> None:
        """End the process, whatever it does."""
        self._closed.set()
        with self._lock:
            self._process.end()

    def _start(self) -> "HostProcess":
        return HostProcess(self._python, self._work, self._title, self._slots)


class RemoteEnvironment:
    """One environment in the process, as a `TextEnvironment`."""

    def __init__(self, interpreter: Interpreter, id: int) -> None:
        self._interpreter = interpreter
        self._id = id
        self._process: HostProcess | None = None
        self._given_up = False
        self._answer: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def reset(self, prompt: Prompt) -> TextStep:
        self._process = self._interpreter.running()
        if self._given_up:
            raise RemoteFailure(GIVEN_UP)
        plain = {"id": prompt.id, "task": prompt.task, "seed": prompt.seed, "data": prompt.data}
        return _step(self._ask("reset", plain))

    def step(self, action: str) -> TextStep:
        return _step(self._ask("step", action))

    def call(self, method: str, *arguments: Any) -> Any:
        """Result of a method of the environment; None if it has none of that name."""
        return self._ask("call", method, arguments)

    def close(self) -> None:
        if self._process is not None:
            self._process.forget(self._id)

    def abandon(self) -> None:
        """Give up the call that is being waited for, or is about to be made. Called by another thread."""
        self._given_up = True
        if self._process is not None:
            self._process.abandon(self._id)

    def _ask(self, kind: str, *arguments: Any) -> Any:
        if self._process is None:
            raise RemoteFailure("the environment was not reset")
        self._process.ask(self._id, self._answer, (kind, self._id, *arguments))
        answer = self._answer.get()
        if isinstance(answer, Failed):
            raise RemoteFailure(answer.reason, permanent=answer.permanent)
        return answer


class HostProcess:
    """One process. It is alive until `death` is set, and never after that."""

    def __init__(self, python: str, work: Work, title: str, slots: int) -> None:
        self.death: str | None = None
        """Why it is dead."""
        self.answered = False
        """Whether it has answered any call."""
        self._python = python
        self._slots = slots
        self._calls: dict[int, queue.SimpleQueue[Any]] = {}
        self._abandoned: set[int] = set()
        """Environments whose call was given up and has not been answered since."""
        self._given_up: set[int] = set()
        """Environments that were given up between two calls."""
        self._lock = threading.Lock()
        """Guards `_calls`, `_abandoned`, `death`, and that a process is not signalled once it was reaped."""
        self._tail: deque[bytes] = deque(maxlen=8)
        ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls[READY] = ready
        try:
            self._child = subprocess.Popen(
                [python, "-c", BOOT, title],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # a terminal's interrupt goes to the run; and the group is killed as one
                env=_environment_variables(),
            )
        except OSError as error:
            raise RequestError(f"{_named(python)} cannot be started: {error}") from error
        assert self._child.stdin is not None
        self._outbox = Outbox(self._child.stdin)
        self._output = threading.Thread(target=self._forward, name=f"{title}: output", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"{title}: answers", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name=f"{title}: end", daemon=True)
        for thread in (self._output, self._watcher, self._reader):
            thread.start()
        self._set_up(work, ready)

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, id: int, answer: "queue.SimpleQueue[Any]", command: tuple[Any, ...]) -> None:
        """Send a command; its answer, or the death of the process, comes to the queue."""
        with self._lock:
            if self.death is not None:
                raise RemoteFailure(self.death)
            if id in self._given_up:
                raise RemoteFailure(GIVEN_UP)
            self._calls[id] = answer
        self._send(command)

    def forget(self, id: int) -> None:
        """Close an environment."""
        with self._lock:
            if self.death is not None:
                return
            self._calls.pop(id, None)
            self._given_up.discard(id)
        self._send(("close", id))

    def abandon(self, id: int) -> None:
        """Stop waiting for an answer: its waiter gets a failure. Never blocks."""
        with self._lock:
            waiting = self._calls.pop(id, None)
            if waiting is None:
                self._given_up.add(id)
                return
            self._abandoned.add(id)
            if len(self._abandoned) > self._slots and self.death is None:
                self.death = f"{_named(self._python)} had more hanging calls than slots ({self._slots}) and was killed"
        waiting.put(Failed(GIVEN_UP, False))
        if self.death is not None:
            logger.warning("%s", self.death)
            self._kill()

    def end(self) -> None:
        """Let it close what is open, then kill what is left of its process group."""
        self._outbox.close(END_S)
        self._reader.join(END_S)
        self._kill()
        self._reader.join()

    def _set_up(self, work: Work, ready: "queue.SimpleQueue[Any]") -> None:
        setup = {
            "sources": shipped_sources(),
            "packages": PACKAGES,
            "import_path": [path for path in project_paths() if path],
            "factory": work.factory,
            "settings": dict(work.settings),
            "try": work.check,
            "moved": moves(),
        }
        loader = source_of(LOADER).encode()
        with contextlib.suppress(OSError):  # it died, which the reader reports
            self._outbox.write(f"{len(loader)}\n".encode() + loader + msgspec.json.encode(setup) + b"\n")
        try:
            answer = ready.get(timeout=START_S)
        except queue.Empty:
            answer = Failed(f"it was not ready within {START_S:g} s", False)
        if isinstance(answer, Failed):
            self.end()
            raise RequestError(f"{_named(self._python)} cannot play {work.factory}: {answer.reason}")

    def _send(self, command: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):  # it is dead, which the reader notices
            self._outbox.put(msgspec.json.encode(command))

    # --- in threads of its own

    def _read(self) -> None:
        assert self._child.stdout is not None
        cause = ""
        try:
            for frame in _frames(self._child.stdout.fileno()):
                for id, *answer in msgspec.json.decode(frame):
                    self._answer(id, answer)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            cause = f"sent an answer that cannot be decoded ({error}) and "
        self._died(cause)

    def _answer(self, id: int, answer: list[Any]) -> None:
        with self._lock:
            waiting = self._calls.pop(id, None)
            self._abandoned.discard(id)
            self.answered |= id != READY
        if waiting is not None:
            waiting.put(Failed(*answer) if len(answer) == len(Failed._fields) else answer[0])

    def _died(self, cause: str) -> None:
        self._kill()
        self._watcher.join()
        self._output.join(END_S)
        with self._lock:
            code = self._child.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        output = b"".join(self._tail)[-TAIL_BYTES:].decode(errors="replace").strip()
        death = f"{_named(self._python)} {cause}{how}" + (f"; last output: {output}" if output else "")
        with self._lock:
            self.death = death = self.death or death
            waiting, self._calls = list(self._calls.values()), {}
        for each in waiting:
            each.put(Failed(death, False))
        self._outbox.close(END_S)
        assert self._child.stdout is not None
        self._child.stdout.close()

    def _watch(self) -> None:
        """Kill what the process leaves behind as soon as it ends: processes that it forked may hold its pipes open."""
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        self._kill()

    def _forward(self) -> None:
        """Write what the process and its children print to stderr of this process."""
        assert self._child.stderr is not None
        while chunk := os.read(self._child.stderr.fileno(), 1 << 16):
            self._tail.append(chunk)
            with contextlib.suppress(OSError):
                os.write(2, chunk)
        self._child.stderr.close()

    def _kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if self._child.returncode is None:
                os.killpg(self._child.pid, signal.SIGKILL)


def _step(fields: list[Any]) -> TextStep:
    observation, reward, done, truncated, fresh_context, artifact, state, tools = fields
    given = base64.b64decode(artifact)
    return TextStep(observation, reward, done, truncated, fresh_context, given, state, tools)


def _executable(python: str) -> str:
    if not (Path(python).is_file() and os.access(python, os.X_OK)):
        raise RequestError(
            f"{_named(python)} does not exist there or cannot be executed; `python` of a task is the path of an "
            "interpreter on every node that runs its environments"
        )
    return python


def _named(python: str) -> str:
    return f"node {platform.node()}: the interpreter {python}"


def _environment_variables() -> dict[str, str]:
    """Without a hash seed, a library that iterates a set of texts would play a seed differently in every process."""
    inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    return {"PYTHONHASHSEED": "0", **inherited}


def _frames(descriptor: int) -> Iterator[bytes]:
    """Frames of answers, until the other side has closed."""
    received = bytearray()
    while chunk := os.read(descriptor, READ_BYTES):
        received += chunk
        while len(received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "big")
            if len(received) < end:
                break
            yield bytes(received[LENGTH_BYTES:end])
            del received[:end]
