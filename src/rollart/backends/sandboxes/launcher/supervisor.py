"""Supervisor of one sandbox: a process outside of it that makes it, runs its commands, watches them, and removes it.

Conservation rule: whatever ends the supervisor except SIGKILL, it removes processes, mounts, folder and cgroups of its
sandbox first; the launcher does it for one that was killed.

Orders come over the control socket, one at a time, each answered once. A command
is over when its first process is; its exit status is that of `wait4`, out of reach of the command.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tarfile import TarError
from typing import Any, NoReturn

from rollart.backends.sandboxes.launcher import joining, keeper, roots, transfer, watching, wire
from rollart.backends.sandboxes.launcher.cgroups import Group, Tree
from rollart.backends.sandboxes.launcher.syscalls import die_with_parent

ENDING_S = 5.0
"""Time for killed processes to be gone; after that the kernel holds them, and the sandbox is given up."""
KILL_AGAIN_S = 0.1


@dataclass(frozen=True)
class Machine:
    """What the launcher found out at its start."""

    work: Path
    owner: int | None
    """User that sandboxes run as; None if that is the user of the launcher, which is root in its own user namespace."""
    rootless: bool
    overlays: bool
    tree: Tree
    filter: bytes
    skeleton: Path


class Lost(Exception):
    """The sandbox was killed from outside, or does not end."""


class Supervisor:
    def __init__(self, machine: Machine, control: socket.socket, order: dict[str, Any]) -> None:
        self._machine, self._control, self._order = machine, control, order
        self._limits: dict[str, Any] = order["limits"]
        self._folder = machine.work / order["name"]
        owner = machine.owner or 0
        self._root = roots.Root(self._folder, owner, rootless=machine.rootless, overlays=machine.overlays)
        self._group = Group(machine.tree, order["name"])
        self._keeper: keeper.Keeper | None = None
        self._door: joining.Door

    def run(self) -> None:
        try:
            try:
                self._make()
            except (OSError, KeyError, ValueError) as error:
                wire.send(self._control, {"failed": f"{error}"})
                return
            wire.send(self._control, {"ready": self._child})
            self._serve()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker has closed the sandbox, or is gone
        finally:
            self._remove()

    # --- beginning and end ------------------------------------------------------------------------------------------

    def _make(self) -> None:
        base = self._order["base"]
        lower = str(self._machine.skeleton) if base == roots.HOST else base
        # The writable layer is charged to whoever writes it, so its size is added to the limit of memory.
        self._group.make(self._limits["memory_mb"] + self._limits["disk_mb"], self._limits["processes"])
        self._root.make([*self._order["layers"], lower], self._limits)
        self._keeper = keeper.start(self._root, self._folder, self._order, self._machine.owner)
        user = 0 if self._order["root"] else roots.USER_ID
        self._door = joining.Door.of(self._child, user, self._group.open())

    @property
    def _child(self) -> int:
        assert self._keeper is not None
        return self._keeper.child

    def _remove(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._keeper is not None:
            self._keeper.kill()
        deadline = time.monotonic() + ENDING_S
        while not self._group.remove() and time.monotonic() < deadline:
            time.sleep(0.002)
        roots.remove(self._folder)

    # --- orders -----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._keeper is not None
        while True:
            readable = wire.wait([self._control.fileno(), self._keeper.exited])
            if self._keeper.exited in readable:
                # The answer to the next request: a death, not merely the end of the control socket.
                wire.send(self._control, {"lost": "it was killed from outside"})
                return
            received = wire.receive(self._control)
            if received is None:
                return
            order, descriptors = received
            try:
                answer = self._answer(order, descriptors)
            except Lost as error:
                wire.send(self._control, {"lost": str(error)})
                return
            finally:
                wire.close(*descriptors)
            if answer is not None:
                wire.send(self._control, answer)

    def _answer(self, order: dict[str, Any], descriptors: list[int]) -> dict[str, Any] | None:
        match order["do"]:
            case "exec":
                return self._exec(order, descriptors)
            case "keep":
                try:
                    self._root.keep(Path(order["target"]))
                except transfer.Unreasonable as error:
                    return {"unreasonable": str(error)}
                except OSError as error:
                    return {"error": str(error)}
                return {}
            case operation:
                return self._transfer(transfer.OPERATIONS[operation], order, descriptors)

    def _transfer(
        self, operation: transfer.Operation, order: dict[str, Any], descriptors: list[int]
    ) -> dict[str, Any] | None:
        """In a process of its own, which also answers, because it may have a file to hand over."""

        def work() -> None:
            joining.limit(self._limits, memory=False, processes=False)
            self._door.join_groups()
            self._door.enter()
            self._door.become_user()
            try:
                answer = operation(order, descriptors)
            except (OSError, ValueError, TarError) as error:
                answer = transfer.describe(error)
            descriptor = answer.pop("descriptor", None)
            wire.send(self._control, answer, [] if descriptor is None else [descriptor])

        _, status = os.waitpid(_fork(work), 0)
        return None if status == 0 else {"error": f"the transfer was ended: {_status_text(status)}"}

    # --- commands ---------------------------------------------------------------------------------------------------

    def _exec(self, order: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        before = watching.counters(self._group)
        reader, writer = os.pipe()
        began = time.monotonic()
        joiner = _fork(lambda: self._join(order, descriptors, writer))
        os.close(writer)
        try:
            ended = self._wait(reader, began + order["time_s"])
        finally:
            os.close(reader)
            with suppress(ProcessLookupError):
                os.kill(joiner, signal.SIGKILL)  # it has reported, or what it waits for no longer matters
            os.waitpid(joiner, 0)
        seconds = time.monotonic() - began
        if not order["keep_background"]:
            self._wait_until_empty()
        after = watching.counters(self._group)
        return watching.judge(ended, before, after) | {"seconds": seconds, "disk_full": self._root.full()}

    def _join(self, order: dict[str, Any], descriptors: list[int], result: int) -> None:
        """Run a command in the sandbox and write its end to `result`."""
        joining.mark_for_oom()
        self._door.enter()
        failed_reader, failed_writer = os.pipe()
        command = _fork(lambda: self._command(order, descriptors, failed_writer))
        wire.close(failed_writer, *descriptors)
        failed = os.read(failed_reader, 4096).decode()
        _, status, usage = os.wait4(command, 0)
        if not order["keep_background"]:
            self._kill_all()
        end = {"status": status, "failed": failed, "cpu_s": usage.ru_utime + usage.ru_stime}
        os.write(result, json.dumps(end).encode())

    def _command(self, order: dict[str, Any], descriptors: list[int], failed: int) -> None:
        """The first process of a command. It reports to `failed` if it does not become the program, and why."""
        try:
            os.setsid()
            self._door.join_groups()
            for target, descriptor in enumerate(descriptors):
                os.dup2(descriptor, target)
            failed = os.dup2(failed, len(descriptors), inheritable=False)
            joining.keep_first(failed + 1)
            joining.limit(
                self._limits, memory=not self._group.limits_memory, processes=not self._group.limits_processes
            )
            os.umask(0o022)
            self._door.become_user()
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            code = self._machine.filter
        except OSError as error:
            _report(failed, error, watching.SETUP)
            return
        try:
            os.chdir(order["cwd"])
            joining.confine(code)
            os.execvpe(order["command"][0], order["command"], order["env"])
        except (OSError, ValueError) as error:
            _report(failed, error, "")

    def _kill_all(self) -> None:
        """By a joiner: ends everything in the sandbox except the keeper."""

        def kill() -> None:
            self._door.become_user()
            joining.kill_everything()

        os.waitpid(_fork(kill), 0)

    def _wait(self, result: int, deadline: float) -> watching.End:
        """Until the joiner reports; kills the command at its deadline and at the limit of memory."""
        assert self._keeper is not None
        control = self._control.fileno()
        killed_by = ""
        next_kill = deadline
        watch = None if self._group.limits_memory else watching.Watch(self._child, self._limits["memory_mb"])
        while True:
            now = time.monotonic()
            if watch is not None and not killed_by and watch.over():
                killed_by, next_kill = "memory", now
            if now >= next_kill:
                killed_by = killed_by or "time"
                self._kill_from_outside()
                next_kill = now + KILL_AGAIN_S
            if killed_by and now > deadline + ENDING_S:
                raise Lost("its processes do not end, although they were killed")
            pause = next_kill - now if watch is None else min(next_kill - now, watching.LOOK_S)
            readable = wire.wait([result, self._keeper.exited, control], pause)
            if self._keeper.exited in readable:
                raise Lost("it was killed from outside while a command ran")
            if control in readable:
                raise BrokenPipeError("the worker closed the sandbox")  # it sends nothing while a command runs
            if result in readable:
                report = os.read(result, 2**16)
                if not report:
                    raise Lost("the process that waits for its command was killed")
                end = watching.End(**json.loads(report), killed_by=killed_by)
                if not killed_by and self._keeper.dying:
                    raise Lost("it was killed from outside while a command ran")
                return end

    def _kill_from_outside(self) -> None:
        def kill() -> None:
            self._door.enter()
            self._kill_all()

        os.waitpid(_fork(kill), 0)

    def _wait_until_empty(self) -> None:
        """What was killed still ends: the next command should find its limits unused."""
        deadline = time.monotonic() + ENDING_S
        while self._group.processes():
            if time.monotonic() > deadline:
                raise Lost("its processes do not end, although they were killed")
            time.sleep(0.001)


def _report(descriptor: int, error: Exception, prefix: str) -> None:
    number = error.errno if isinstance(error, OSError) else None
    text = transfer.describe(error)["error"][:1000]
    os.write(descriptor, json.dumps([number or 0, f"{prefix}{text}"]).encode())


def _fork(work: Callable[[], None]) -> int:
    """A child that does this and nothing else, and dies with this process."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _be_child(work, parent)
    return child


def _be_child(work: Callable[[], None], parent: int) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A child in a new PID namespace cannot name its parent: it ends with the keeper.
        die_with_parent(signal.SIGKILL, parent if os.getppid() != 0 else 0)
        with suppress(BrokenPipeError):
            work()
            code = 0
    finally:
        os._exit(code)


def _status_text(status: int) -> str:
    """
    >>> _status_text(9), _status_text(256)
    ('by signal 9', 'with code 1')
    """
    return f"by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"with code {os.WEXITSTATUS(status)}"
