"""The process of one worker, as a Ray actor.

    controller ──► Connection ──► Drive's mailbox ──► the worker, in a thread of its own
    controller ◄── Connection ◄── EventSender ◄── joined, events, died

Ray starts the process, detects its death and ends it. Frequent messages have their own connection (`link`): a Ray call
takes several times the CPU time.
"""

import faulthandler
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import msgspec
import ray
import ray._private.worker as ray_worker

from rollart.distributed.driving import Drive
from rollart.distributed.link import Address, Connection
from rollart.distributed.wire import Died, Message, decode, encode
from rollart.ports.factory import load
from rollart.ports.worker import Worker
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
    """Working directory of the controller, so that relative paths mean the same to the worker."""
    log: str
    cores: tuple[int, ...]
    """Cores to run on; empty = any."""
    address: Address
    """Address of the controller, and the secret that identifies the worker to it."""
    secret: bytes


class WorkerProcess:
    """One worker and its dedicated process."""

    def __init__(self, blob: bytes) -> None:
        order = msgspec.msgpack.decode(blob, type=Order)
        # The token gives access to this Ray: processes started by the worker must not inherit it.
        os.environ.pop(TOKEN_VARIABLE, None)
        _write_to(Path(order.log))
        if order.cores:
            os.sched_setaffinity(0, order.cores)
        os.chdir(order.folder)
        sys.path.extend(path for path in order.import_path if path not in sys.path)
        self._title = title_of(order.role, order.worker)
        self._connection = Connection(order.address, order.secret)
        self._sender = EventSender(self._connection)
        self._starting_s = 0.0
        self._drive = Drive(order.worker, self._build(order), time.monotonic, self._sender)
        self._thread = threading.Thread(target=self._drive.run, name=f"{order.role}:{order.worker}", daemon=True)
        self._thread.start()
        threading.Thread(target=self._receive, name="commands", daemon=True).start()

    def _receive(self) -> None:
        """Receive commands. An error here is reported as a death, since no caller awaits an answer."""
        for blob in self._connection.receive():
            try:
                self._drive.give(cast("list[WorkerCommand]", decode(blob)))
            except msgspec.MsgspecError as error:
                self._sender.died(f"a command could not be decoded: {error}")

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
            settings = {key: pickle.loads(value) for key, value in order.settings.items()}
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


def _write_to(log: Path) -> None:
    """Redirect everything this process prints, native code included, to a log file of the run."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    faulthandler.enable(file=2)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
