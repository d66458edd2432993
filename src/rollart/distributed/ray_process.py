"""What runs inside the process of one worker, as a Ray actor.

    controller ──► Line ──► Drive's mailbox ──► the worker, in a thread of its own
    controller ◄── Line ◄── Voice ◄── joined, events, died

Ray starts the process, knows when it is gone, and ends it. What is said many times a second has a connection of its own
(`link`): a call of Ray takes several times the processor time.
"""

import faulthandler
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import ray

from rollart.distributed.driving import Drive
from rollart.distributed.link import Address, Line
from rollart.distributed.wire import Died, Message, decode, encode
from rollart.ports.factory import load
from rollart.ports.worker import Worker
from rollart.types.messages import WorkerCommand, WorkerEvent, WorkerInfo

TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
WATCH = "watch"
"""A concurrency group of one thread: `wait` does not hold up `end`."""

logger = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True):
    """What to build, and where. Settings are pickled one by one by who gives the order (see `ray_runtime`)."""

    worker: str
    role: str
    factory: str
    settings: Mapping[str, bytes]
    import_path: tuple[str, ...]
    """Where the controller finds modules: what it can import, the worker can."""
    folder: str
    """Where the controller runs: what is relative to it means the same to the worker."""
    log: str
    cores: tuple[int, ...]
    """The cores to run on; none named: any."""
    address: Address
    """Where the controller is called, and the secret by which it knows who calls."""
    secret: bytes


class WorkerProcess:
    """One worker and the process that is there for it alone."""

    def __init__(self, blob: bytes) -> None:
        order = msgspec.msgpack.decode(blob, type=Order)
        # The token opens this Ray to whoever has it: what the worker starts must not inherit it.
        os.environ.pop(TOKEN_VARIABLE, None)
        _write_to(Path(order.log))
        if order.cores:
            os.sched_setaffinity(0, order.cores)
        os.chdir(order.folder)
        sys.path.extend(path for path in order.import_path if path not in sys.path)
        self._line = Line(order.address, order.secret)
        self._voice = Voice(self._line)
        self._starting_s = 0.0
        self._drive = Drive(order.worker, self._build(order), time.monotonic, self._voice)
        self._thread = threading.Thread(target=self._drive.run, name=f"{order.role}:{order.worker}", daemon=True)
        self._thread.start()
        threading.Thread(target=self._listen, name="commands", daemon=True).start()

    def _listen(self) -> None:
        """An error here is told as a death: nobody waits for an answer."""
        for blob in self._line.listen():
            try:
                self._drive.give(cast("list[WorkerCommand]", decode(blob)))
            except msgspec.MsgspecError as error:
                self._voice.died(f"a command did not arrive whole: {error}")

    @ray.method(concurrency_group=WATCH)  # type: ignore[untyped-decorator]
    def wait(self) -> None:
        """Until the worker is over; fails when its process is."""
        self._thread.join()

    def end(self) -> float:
        """Close the worker and wait until it is closed; gives the CPU seconds that this process took for its work."""
        self._drive.end()
        self._thread.join()
        return time.process_time() - self._starting_s

    def _build(self, order: Order) -> Callable[[Callable[[], None]], Worker]:
        def build(wake: Callable[[], None]) -> Worker:
            factory = load(order.factory)
            settings = {key: pickle.loads(value) for key, value in order.settings.items()}
            worker = cast("Worker", factory(settings, wake))
            self._starting_s = time.process_time()
            return worker

        return build


class Voice:
    """What the worker says, on its way at once. A death is the last of it."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._speaking = threading.Lock()
        self._over = False

    def joined(self, info: WorkerInfo) -> None:
        self._say([info])

    def events(self, events: list[WorkerEvent]) -> None:
        self._say(events)

    def died(self, reason: str) -> None:
        self._say([Died(reason)], last=True)

    def _say(self, messages: Sequence[Message], *, last: bool = False) -> None:
        blob = encode(messages)
        with self._speaking:
            if self._over:
                return
            self._over = last
            try:
                self._line.say(blob)
            except OSError:
                self._over = True
                if not last:
                    raise  # nobody is left to work for: the worker ends
                logger.warning("nobody was there to hear of the death")


def _write_to(log: Path) -> None:
    """Everything this process prints goes to a file of the run, native code's last words too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    faulthandler.enable(file=2)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
