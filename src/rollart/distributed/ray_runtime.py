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
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, get_args

import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from rollart.distributed import ray_placement
from rollart.distributed.code_travel import Code
from rollart.distributed.interpreter import own_version
from rollart.distributed.link import Peer, PeerServer
from rollart.distributed.ray_files import ControllerFiles
from rollart.distributed.ray_placement import Reserved
from rollart.distributed.ray_process import WATCH, Order, WorkerProcess
from rollart.distributed.remote_logs import collect
from rollart.distributed.travelling import pack
from rollart.distributed.wire import Died, Message, decode, encode
from rollart.policy.placement import Moves
from rollart.ports.import_paths import project_paths
from rollart.ports.ranks import RankStarter, Shares
from rollart.ports.runtime import Listener
from rollart.types.errors import InvariantBroken, LinkError, RequestError, RuntimeLost
from rollart.types.ids import WorkerId
from rollart.types.messages import Role, WorkerCommand, WorkerInfo
from rollart.types.placement import NOTHING, Needs

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
FINAL_REPORT_S = 1.0
"""Time to wait for messages of a dead process in flight, and for Ray to report why it died."""
LOOK_S = 1.0
"""How often to look for frozen processes, and for nodes that drain or have come back."""
FORGIVEN_S = 300.0
"""After this long, a failure on a node is no longer counted together with earlier ones."""
LOG_TAIL_BYTES = 16384
UNEXPLAINED = "Worker unexpectedly exits with a connection error"
"""Ray's generic message for a process that is suddenly gone; it then lists possible causes."""
FATAL = "Fatal Python error"
"""Prefix of `faulthandler` output."""
INFOS = get_args(WorkerInfo)


class RayConnection(Protocol):
    """A Ray that this process is connected to: `LocalRay`, `RayCluster`."""

    def lost(self) -> str:
        """Why it is lost, as a clause; empty while it is there."""
        ...

    def when_lost(self, act: Callable[[], None]) -> None:
        """Set the callback for its loss."""
        ...


class RayRuntime:
    """Hosts workers in processes that Ray starts. Use from one event loop, while a `LocalRay` is up."""

    def __init__(
        self,
        logs: Path,
        *,
        cores: Mapping[Role, Sequence[int]] | None = None,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        local: RayConnection | None = None,
        code: Code | None = None,
        files: ControllerFiles | None = None,
        release: Callable[[str], None] | None = None,
    ) -> None:
        """`logs` receives `<worker>.log` of every worker; `cores` pins the workers of a role to some of the cores.

        `local` is the Ray to watch; without it the death of Ray goes unnoticed until workers die of it. `code` is what
        travelled to the nodes of a cluster, where workers reserve what they need (`ray_placement`); without it, workers
        run on this machine, in its working directory, and nothing is reserved. `files` serves the run's files to other
        nodes: without it, all nodes share the disk. `release` is called, in a thread and perhaps repeatedly, with the
        id of a node that drains and has no worker any more.
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
        self._code = code
        self._files = files
        self._release = release
        self._moves = Moves()
        self._watching_all: list[asyncio.Task[None]] = []
        """Tasks that look at all workers and nodes from time to time."""
        self._history: dict[str, _History] = {}
        """By place, which is the name of a worker without its incarnation."""

    def listen(self, listener: Listener) -> None:
        if self._listener is not None:
            raise InvariantBroken("this runtime already has a listener; `listen` is called once")
        self._listener = listener

    def spawn(
        self,
        worker: WorkerId,
        role: Role,
        factory: str,
        settings: Mapping[str, Any],
        *,
        python: str = "",
        needs: Needs = NOTHING,
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
            self._watching_all = [self._loop.create_task(self._look_at_workers(), name="look at workers")]
            if self._code is not None:
                self._watching_all.append(self._loop.create_task(self._look_at_nodes(), name="look at nodes"))
        log = self._logs / f"{worker}.log"
        host = _Host(worker, log, self._on_message)
        starter: RankStarter | None = settings.get("rank_starter")
        host.shares = None if starter is None else starter.sender(worker)
        order = Order(
            worker,
            role.value,
            factory,
            _pickled(worker, settings if self._files is None else pack(settings, self._files)),
            self._import_path(python),
            str(Path.cwd() if self._code is None else self._code.folder),
            self._code is not None,
            own_version(),
            str(log),
            tuple(self._cores.get(role, ())),
            self._server.address,
            None if self._files is None else self._files.home,
            host.peer.credentials,
        )
        self._names.add(worker)
        self._hosts[worker] = host
        self._server.expect(host.peer)
        actor, blob = _actor(python), msgspec.msgpack.encode(order)
        if self._code is not None:
            host.watching = self._loop.create_task(self._place(host, actor, blob, needs), name=f"place {worker}")
        else:
            host.actor = actor.remote(blob)
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
        self._moves.gone(worker)
        ending = self._loop.create_task(self._end(host), name=f"end {worker}")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        self._closed = True
        for worker in list(self._hosts):
            self.stop(worker)
        await asyncio.gather(*self._ending, return_exceptions=self._failed)  # if failed, they are cancelled
        for watching in self._watching_all:
            watching.cancel()
        if self._server is not None:
            await self._server.close()

    def _flush(self, worker: WorkerId) -> None:
        commands = self._outgoing.pop(worker)
        host = self._hosts.get(worker)
        if host is None:
            return
        if host.shares is not None:
            commands = host.shares.divide(commands)
        try:
            host.peer.send(encode(commands))
        except LinkError as error:
            if not host.reason.done():
                host.reason.set_result(str(error))

    def _on_message(self, host: "_Host", blob: bytes) -> None:
        if host.worker not in self._hosts or host.reason.done():
            return
        try:
            died = self._deliver(host, decode(blob))
        except msgspec.MsgspecError as error:
            died = Died(f"it sent an invalid event: {error}")
        if died is not None:
            host.reason.set_result(died.reason)

    async def _place(self, host: "_Host", actor: Any, blob: bytes, needs: Needs) -> None:
        """Reserve what the worker needs, start it there, and watch it."""
        history = self._history.setdefault(host.worker.rpartition(".")[0] or host.worker, _History())
        reserved = await ray_placement.reserve(
            host.worker,
            needs,
            lambda why: self._call("waits", host.worker, why),
            last=history.node,
            failures=history.failures,
        )
        host.reserved = reserved
        history.begin(reserved.node.id)
        host.actor = actor.options(**reserved.options(needs)).remote(blob)
        self._moves.placed(host.worker, needs, reserved.node.id, reserved.why)
        self._call("placed", host.worker, reserved.node.name, reserved.why)
        began = time.monotonic()
        try:
            await self._watch(host)
        finally:
            history.end(time.monotonic() - began)

    async def _look_at_workers(self) -> None:
        """Notice processes that are frozen: their machine answers, but they send nothing."""
        while not self._failed:
            await asyncio.sleep(LOOK_S)
            for host in self._hosts.values():
                if host.peer.silent(LOOK_S) and not host.reason.done():
                    host.reason.set_result("its process is frozen: it is alive, but nothing has come from it for long")

    async def _look_at_nodes(self) -> None:
        """Report workers that should leave their node."""
        while not self._failed:
            await asyncio.sleep(LOOK_S)
            try:
                nodes = await ray_placement.in_thread(ray_placement.read_nodes)
            except RayError as error:  # such as a cut of the network
                logger.info("the nodes of the cluster could not be read: %s", error)
                continue
            self._call("nodes_seen", nodes)
            for worker, why in self._moves.look(time.monotonic(), nodes):
                self._call("leaves", WorkerId(worker), why)
            if self._release is not None and not self._ending:
                used = {host.reserved.node.id for host in self._hosts.values() if host.reserved is not None}
                for node in nodes:
                    if node.draining and node.id not in used:
                        await ray_placement.in_thread(partial(self._release, node.id))

    def _import_path(self, python: str) -> tuple[str, ...]:
        if self._code is not None:
            return self._code.import_path
        return project_paths() if python else tuple(sys.path)

    async def _watch(self, host: "_Host") -> None:
        """Report the worker's death. Cancelled by `stop`, after which nothing is reported."""
        assert host.actor is not None
        process: asyncio.Future[None] = asyncio.ensure_future(host.actor.wait.remote())
        final_report: set[asyncio.Future[Any]] = {host.peer.closed, host.reason}
        try:
            await asyncio.wait({process, *final_report}, return_when=asyncio.FIRST_COMPLETED)
            if not host.reason.done() and host.peer.connected:
                await asyncio.wait(final_report, timeout=FINAL_REPORT_S, return_when=asyncio.FIRST_COMPLETED)
            if not host.reason.done() and self._files is not None and host.reserved is not None:
                await collect(self._files.home, host.worker, host.reserved.node.id)
            reason = host.reason.result() if host.reason.done() else await _cause_of_end(process, host.log)
        finally:
            process.cancel()
        if host.worker in self._hosts and not self._lost():
            self.stop(host.worker)  # first, so that the listener may already spawn a successor
            where = "" if host.reserved is None else f" (on node {host.reserved.node.name})"
            self._call("died", host.worker, reason + where)

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
        if host.actor is None:  # it waited for a node
            self._forget(host)
            return
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
            if host.reserved is not None:
                ray_placement.release(host.reserved)
            if host.shares is not None:
                host.shares.release()

    def _forget(self, host: "_Host") -> None:
        if host.shares is not None:
            host.shares.close()
        assert self._server is not None  # created with the first host
        self._server.forget(host.peer)


class _History:
    """Where a worker ran, over its incarnations."""

    def __init__(self) -> None:
        self.node = ""
        self.failures = 0
        """Failures on that node in a row."""

    def begin(self, node: str) -> None:
        if node != self.node:
            self.node, self.failures = node, 0

    def end(self, lived_s: float) -> None:
        self.failures = 1 if lived_s > FORGIVEN_S else self.failures + 1


class _Host:
    """The controller's side of one worker."""

    def __init__(self, worker: WorkerId, log: Path, on_message: Callable[["_Host", bytes], None]) -> None:
        self.worker = worker
        self.log = log
        self.actor: ActorHandle | None = None
        self.reserved: Reserved | None = None
        self.shares: Shares | None = None
        """Set for a trainer whose ranks get their shares of a batch from here."""
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
