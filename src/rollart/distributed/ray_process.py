"""The process of one worker, as a Ray actor.

    controller ──► Connection ──► Drive's mailbox ──► the worker, in a thread of its own
    controller ◄── Connection ◄── EventSender ◄── joined, events, died

Ray starts the process, detects its death and ends it. Frequent messages have their own connection (`link`): a Ray call
takes several times the CPU time.
"""

import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import ray
import ray._private.worker as ray_worker

from rollart.distributed import one_interface
from rollart.distributed.driving import Drive
from rollart.distributed.handshake import Credentials
from rollart.distributed.interpreter import own_version
from rollart.distributed.link import PULSE, PULSE_S, Address, Connection
from rollart.distributed.ray_files import Home
from rollart.distributed.remote_logs import LogForwarder, redirect
from rollart.distributed.travelling import TravellingFolder, unpack
from rollart.distributed.wire import Died, Message, decode, encode
from rollart.ports.factory import load, moved
from rollart.ports.worker import Worker
from rollart.types.errors import LinkError, RequestError
from rollart.types.messages import WorkerCommand, WorkerEvent, WorkerInfo

TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
WATCH = "watch"
"""Concurrency group of one thread, so that `wait` does not block `end`."""

TITLE = "rollart: "
"""Prefix of the titles of worker processes."""

logger = logging.getLogger(__name__)


def title_of(role: str, worker: str) -> str:
    """Process title of a worker, as shown by `ps` and `top`.

    >>> title_of("engine", "engine/H20/0.0")
    'rollart: engine H20/0.0'
    """
    return f"{TITLE}{role} {worker.removeprefix(role + '/')}"


class Order(msgspec.Struct, frozen=True):
    """What to build, and where. Settings are pickled one by one by the sender (see `ray_runtime`)."""

    worker: str
    role: str
    factory: str
    settings: Mapping[str, bytes]
    import_path: tuple[str, ...]
    """Import path of the controller, so that the worker can import the same modules.

    For another interpreter, only entries that belong to no interpreter: it has its own packages.
    """
    folder: str
    """Folder of the controller that relative paths refer to; on its machine the worker's working directory.

    On a cluster its files travelled: the working directory of the worker is a copy of it (`code_travel`).
    """
    travelled: bool
    rollart: str
    """Version of the controller, which the worker's must be the same as."""
    log: str
    cores: tuple[int, ...]
    """Cores to run on; empty = any."""
    address: Address
    """Address of the controller."""
    home: Home | None
    """The controller's files, on a cluster."""
    credentials: Credentials
    """What the worker and the controller identify each other with."""


class OwnProcess(NamedTuple):
    """Context of a worker process, for processes that the worker starts on other nodes."""

    order: Order
    reserved: bool
    """Whether it has a reservation on its node."""
    travelling: dict[str, TravellingFolder]
    """Settings that are folders of the controller's machine, by key."""

    def order_for_others(self) -> Order:
        """Its order without secrets, to prepare further processes with."""
        nothing = Credentials(b"", b"")
        return msgspec.structs.replace(self.order, settings={}, credentials=nothing)


def prepare_process(order: Order, log: Path, name: str) -> LogForwarder | None:
    """Make this process one of the run: its output, cores, working directory and import path.

    `name` is that of its log in the run folder. Returns what sends it there, if it is on another machine.
    """
    # The token gives access to this Ray: processes started by the worker must not inherit it.
    os.environ.pop(TOKEN_VARIABLE, None)
    one_interface.remove_variables(os.environ)
    forwarder = redirect(log, name, order.home)
    if order.cores:
        os.sched_setaffinity(0, order.cores)
    check_version(order.rollart)
    if order.travelled:
        here = Path.cwd()
        moved(Path(order.folder), here)
        sys.path.extend(str(here / path) for path in order.import_path)
    else:
        os.chdir(order.folder)
        sys.path.extend(path for path in order.import_path if path not in sys.path)
    return forwarder


_own: list[OwnProcess] = []


def own_process() -> OwnProcess | None:
    """None if this process is not that of a worker."""
    return _own[0] if _own else None


class WorkerProcess:
    """One worker and its dedicated process."""

    def __init__(self, blob: bytes) -> None:
        order = msgspec.msgpack.decode(blob, type=Order)
        self._forwarder = prepare_process(order, Path(order.log), order.worker)
        _own[:] = [OwnProcess(order, ray.util.get_current_placement_group() is not None, {})]
        self._title = title_of(order.role, order.worker)
        self._connection = Connection(order.address, order.credentials)
        self._sender = EventSender(self._connection)
        self._starting_s = 0.0
        self._drive = Drive(order.worker, self._build(order), time.monotonic, self._sender)
        self._thread = threading.Thread(target=self._drive.run, name=f"{order.role}:{order.worker}", daemon=True)
        self._thread.start()
        threading.Thread(target=self._receive, name="commands", daemon=True).start()
        threading.Thread(target=self._sender.pulse, name="pulse", daemon=True).start()

    def _receive(self) -> None:
        """Receive commands until the connection is over, which ends the worker.

        An error here is reported as a death, since no caller awaits an answer.
        """
        try:
            for blob in self._connection.receive():
                self._drive.give(cast("list[WorkerCommand]", decode(blob)))
        except (LinkError, msgspec.MsgspecError) as error:
            self._sender.died(f"a command could not be decoded: {error}")
        self._drive.end()  # to the controller it is dead by now, or will be once it notices

    @ray.method(concurrency_group=WATCH)  # type: ignore[untyped-decorator]
    def wait(self) -> None:
        """Block until the worker is over; fails if its process dies."""
        with self._titled():
            self._thread.join()

    def end(self) -> float:
        """Close the worker and wait for it; returns the CPU seconds that this process spent on its work."""
        with self._titled():
            self._drive.end()
            self._thread.join()
            if self._forwarder is not None:
                self._forwarder.close()
        return time.process_time() - self._starting_s

    @contextmanager
    def _titled(self) -> Iterator[None]:
        """Title the process after its worker. Ray sets its own title at the beginning and at the end of a call."""
        with ray_worker._changeproctitle(self._title, self._title):
            with suppress(OSError):  # `top` shows the name of the main thread, up to 15 characters
                Path("/proc/self/comm").write_text(self._title.removeprefix(TITLE), encoding="utf-8")
            yield

    def _build(self, order: Order) -> Callable[[Callable[[], None]], Worker]:
        def build(wake: Callable[[], None]) -> Worker:
            factory = load(order.factory)
            packed = {key: pickle.loads(value) for key, value in order.settings.items()}
            folders = {key: value for key, value in packed.items() if isinstance(value, TravellingFolder)}
            _own[:] = [own._replace(travelling=folders) for own in _own]
            settings = unpack(packed)
            worker = cast("Worker", factory(settings, wake))
            self._starting_s = time.process_time()
            return worker

        return build


class EventSender:
    """Sends the worker's reports at once. A death is the last one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._closed = False

    def joined(self, info: WorkerInfo) -> None:
        self._send([info])

    def events(self, events: list[WorkerEvent]) -> None:
        self._send(events)

    def died(self, reason: str) -> None:
        self._send([Died(reason)], last=True)

    def pulse(self) -> None:
        """Send a heartbeat every `PULSE_S` until the connection is over."""
        over = threading.Event()
        while not over.wait(PULSE_S):
            with self._lock:
                if self._closed:
                    return
                try:
                    self._connection.send(PULSE)
                except OSError:  # the controller is gone; the next report ends the worker
                    return

    def _send(self, messages: Sequence[Message], *, last: bool = False) -> None:
        blob = encode(messages)
        with self._lock:
            if self._closed:
                return
            self._closed = last
            try:
                self._connection.send(blob)
            except OSError:
                self._closed = True
                if not last:
                    raise  # the controller is gone: the worker ends
                logger.warning("the controller was gone before the death was reported")


def check_version(controller: str) -> None:
    """Refuse to run with another rollart than the controller's: their messages may differ."""
    if own_version() != controller:
        raise RequestError(
            f"this node has rollart {own_version()} and the controller has {controller}; install the same version"
        )
