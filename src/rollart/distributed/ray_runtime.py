"""The Ray runtime: every worker has its own process.

        controller's loop                                      process of one worker (`ray_process`)
    post ──► outgoing ──(end of this pass of the loop)── link ──► mailbox ──► Worker.post, Worker.advance
    Listener ◄──────────────────────────────────────── link ◄── joined, events, died
    a watching task per worker ◄──────────────────────── Ray ◄── the process is gone

Invariants: messages of one worker arrive in the order in which they were sent, each at most once; a broken connection
or a dead process is the worker's death, reported after everything that it sent before, and the process is then killed.
Ray never restarts anything: the control plane decides. A stopped worker has `close_timeout_s` to close, then its
process is killed, even if it hangs in native code.

The peer starts Ray (`ray_local.LocalRay`); several runtimes may use it one after the other. When Ray itself dies the
runtime fails: the listener gets `failed` and nothing after it, and Ray is not called any more, since it might block.
"""

import asyncio
import logging
import pickle
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from rollart.distributed.interpreter import project_paths
from rollart.distributed.link import Peer, PeerServer
from rollart.distributed.ray_local import LocalRay
from rollart.distributed.ray_process import WATCH, Order, WorkerProcess
from rollart.distributed.wire import Died, Message, decode, encode
from rollart.ports.runtime import Listener
from rollart.types.errors import InvariantBroken, RequestError, RuntimeLost
from rollart.types.ids import WorkerId
from rollart.types.messages import Role, WorkerCommand, WorkerInfo

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
FINAL_REPORT_S = 1.0
"""Time to wait for messages of a dead process in flight, and for Ray to report why it died."""
LOG_TAIL_BYTES = 16384
UNEXPLAINED = "Worker unexpectedly exits with a connection error"
"""Ray's generic message for a process that is suddenly gone; it then lists possible causes."""
FATAL = "Fatal Python error"
"""Prefix of `faulthandler` output."""
INFOS = get_args(WorkerInfo)


class RayRuntime:
    """Hosts workers in processes that Ray starts. Use from one event loop, while a `LocalRay` is up."""

    def __init__(
        self,
        logs: Path,
        *,
        cores: Mapping[Role, Sequence[int]] | None = None,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        local: LocalRay | None = None,
    ) -> None:
        """`logs` receives `<worker>.log` of every worker; `cores` pins the workers of a role to some of the cores.

        `local` is the Ray to watch; without it the death of Ray goes unnoticed until workers die of it.
        """
        self._logs = logs.absolute()
        self._cores = dict(cores or {})
        self._close_timeout_s = close_timeout_s
        self._listener: Listener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hosts: dict[WorkerId, _Host] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._names: set[WorkerId] = set()
        self._outgoing: dict[WorkerId, list[WorkerCommand]] = {}
        self._server: PeerServer | None = None
        self.cpu_s: dict[WorkerId, float] = {}
        """CPU seconds of stopped workers, from when they were built; only of those that closed in time."""
        self._closed = False
        self._local = local
        self._failed = False

    def listen(self, listener: Listener) -> None:
        if self._listener is not None:
            raise InvariantBroken("this runtime already has a listener; `listen` is called once")
        self._listener = listener

    def spawn(
        self, worker: WorkerId, role: Role, factory: str, settings: Mapping[str, Any], *, python: str = ""
    ) -> None:
        if self._listener is None:
            raise InvariantBroken("call `listen` before the first `spawn`: the worker would have no listener")
        if self._closed:
            raise RequestError("this runtime is closed; make a new one to start workers")
        if worker in self._names:
            raise InvariantBroken(f"worker id {worker!r} was used before; every incarnation needs its own id")
        if self._failed:
            return
        if not ray.is_initialized():  # Ray would start implicitly, or join any instance that it finds
            raise RequestError("Ray is not running; open a LocalRay first")
        self._loop = asyncio.get_running_loop()
        if self._server is None:
            self._server = PeerServer(ray.util.get_node_ip_address())
            if self._local is not None:
                self._local.when_lost(self._ray_lost)
        log = self._logs / f"{worker}.log"
        host = _Host(worker, log, self._on_message)
        order = Order(
            worker,
            role.value,
            factory,
            _pickled(worker, settings),
            project_paths() if python else tuple(sys.path),
            str(Path.cwd()),
            str(log),
            tuple(self._cores.get(role, ())),
            self._server.address,
            host.peer.secret,
        )
        self._names.add(worker)
        self._hosts[worker] = host
        self._server.expect(host.peer)
        host.actor = _actor(python).remote(msgspec.msgpack.encode(order))
        host.watching = self._loop.create_task(self._watch(host), name=f"watch {worker}")

    def post(self, worker: WorkerId, commands: Sequence[WorkerCommand]) -> None:
        if worker not in self._hosts or not commands:
            return
        assert self._loop is not None  # a host exists, so `spawn` has set it
        if worker not in self._outgoing:
            self._loop.call_soon(self._flush, worker)
        self._outgoing.setdefault(worker, []).extend(commands)

    def stop(self, worker: WorkerId) -> None:
        host = self._hosts.pop(worker, None)
        if host is None:
            return
        assert self._loop is not None
        host.watching.cancel()
        ending = self._loop.create_task(self._end(host), name=f"end {worker}")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        self._closed = True
        for worker in list(self._hosts):
            self.stop(worker)
        await asyncio.gather(*self._ending, return_exceptions=self._failed)  # if failed, they are cancelled
        if self._server is not None:
            await self._server.close()

    def _flush(self, worker: WorkerId) -> None:
        commands = self._outgoing.pop(worker)
        host = self._hosts.get(worker)
        if host is not None:
            host.peer.send(encode(commands))

    def _on_message(self, host: "_Host", blob: bytes) -> None:
        if host.worker not in self._hosts or host.reason.done():
            return
        try:
            died = self._deliver(host, decode(blob))
        except msgspec.MsgspecError as error:
            died = Died(f"it sent an invalid event: {error}")
        if died is not None:
            host.reason.set_result(died.reason)

    async def _watch(self, host: "_Host") -> None:
        """Report the worker's death. Cancelled by `stop`, after which nothing is reported."""
        process: asyncio.Future[None] = asyncio.ensure_future(host.actor.wait.remote())
        final_report: set[asyncio.Future[Any]] = {host.peer.closed, host.reason}
        try:
            await asyncio.wait({process, *final_report}, return_when=asyncio.FIRST_COMPLETED)
            if not host.reason.done() and host.peer.connected:
                await asyncio.wait(final_report, timeout=FINAL_REPORT_S, return_when=asyncio.FIRST_COMPLETED)
            reason = host.reason.result() if host.reason.done() else await _cause_of_end(process, host.log)
        finally:
            process.cancel()
        if host.worker in self._hosts and not self._lost():
            self.stop(host.worker)  # first, so that the listener may already spawn a successor
            self._call("died", host.worker, reason)

    def _ray_lost(self) -> None:
        """Callback of `LocalRay`, from another thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: the run is over
            self._loop.call_soon_threadsafe(self._fail)

    def _fail(self) -> None:
        """Fail as a whole, before workers die one by one."""
        if self._failed or self._closed:
            return
        assert self._local is not None
        self._failed = True
        for host in self._hosts.values():
            host.watching.cancel()
            self._forget(host)
        self._hosts.clear()
        for ending in self._ending:
            ending.cancel()
        self._call("failed", RuntimeLost(self._local.lost()))

    def _lost(self) -> bool:
        return self._local is not None and bool(self._local.lost())

    def _deliver(self, host: "_Host", messages: list[Message]) -> Died | None:
        """Deliver one batch: at most `joined` first and a death last, which is returned to the caller."""
        worker = host.worker
        if isinstance(messages[0], INFOS) and worker in self._hosts:
            self._call("joined", worker, messages.pop(0))
        last = messages[-1] if messages else None
        events = messages[:-1] if isinstance(last, Died) else messages
        if events and worker in self._hosts:
            self._call("events", worker, events)
        return last if isinstance(last, Died) else None

    def _call(self, what: str, *details: object) -> None:
        """Call the listener. Its errors go to the loop's handler; other workers' events must not be lost."""
        assert self._loop is not None
        try:
            getattr(self._listener, what)(*details)
        except Exception as error:  # noqa: BLE001
            self._loop.call_exception_handler({"message": f"the listener failed in `{what}`", "exception": error})

    async def _end(self, host: "_Host") -> None:
        try:
            async with asyncio.timeout(self._close_timeout_s):
                self.cpu_s[host.worker] = await host.actor.end.remote()
        except TimeoutError:
            logger.warning(
                "worker %s did not close within %g s and is killed; see %s",
                host.worker,
                self._close_timeout_s,
                host.log,
            )
        except RayError:
            pass  # gone already
        finally:
            self._forget(host)
        if not self._lost():
            ray.kill(host.actor)

    def _forget(self, host: "_Host") -> None:
        assert self._server is not None  # created with the first host
        self._server.forget(host.peer)


class _Host:
    """The controller's side of one worker."""

    def __init__(self, worker: WorkerId, log: Path, on_message: Callable[["_Host", bytes], None]) -> None:
        self.worker = worker
        self.log = log
        self.actor: ActorHandle
        self.peer = Peer(lambda blob: on_message(self, blob))
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Cause of its death, if it could report it itself."""
        self.watching: asyncio.Task[None]


# No CPUs are reserved: many workers share few cores, and the control plane decides how many there are.
_ACTOR = ray.remote(
    num_cpus=0,
    max_restarts=0,
    max_task_retries=0,
    allow_out_of_order_execution=False,
    concurrency_groups={WATCH: 1},
)(WorkerProcess)


def _actor(python: str) -> Any:
    """Actor class for the process of a worker, with its own interpreter if `python` is a path."""
    # Quoted, because Ray puts it into a shell command.
    return _ACTOR.options(runtime_env={"py_executable": shlex.quote(python)}) if python else _ACTOR


def _pickled(worker: WorkerId, settings: Mapping[str, Any]) -> dict[str, bytes]:
    """Pickle each setting separately, so that the error names the one that cannot be sent."""
    pickled = {}
    for key, value in settings.items():
        try:
            pickled[key] = pickle.dumps(value)
        except Exception as error:
            raise RequestError(
                f"setting {key!r} of worker {worker} is a {type(value).__name__}, which cannot be sent to another "
                f"process: {error}"
            ) from error
    return pickled


async def _cause_of_end(process: asyncio.Future[None], log: Path) -> str:
    """Cause of death of a worker that did not report one."""
    try:
        async with asyncio.timeout(FINAL_REPORT_S):
            await process
    except RayError as error:
        return _cause(error, log)
    except TimeoutError:
        pass
    return _with_last_log_line("its connection broke", log)


def _cause(error: RayError, log: Path) -> str:
    """Why a call failed, in one line: what the process raised, or that it ended, and its last output."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    reason = str(error).strip().splitlines()[-1]
    if UNEXPLAINED in reason:
        reason = "its process ended without an error: killed by hand or for lack of memory, or a crash in native code"
    return _with_last_log_line(reason, log)


def _with_last_log_line(reason: str, log: Path) -> str:
    line = _last_log_line(log)
    return f"{reason}; {log}: {line}" if line else reason


def _last_log_line(log: Path) -> str:
    """The last line of a log; after a crash in native code, the line that names it."""
    try:
        tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith(FATAL)), lines[-1] if lines else "")
