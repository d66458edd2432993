"""What runs inside the process of one worker, as a Ray actor.

    give  ──► Drive's mailbox ──► the worker, in a thread of its own
    poll  ◄── Outbox ◄── joined, events, died

`poll` waits until there is something to say and takes all of it, so what comes while an answer travels goes with the
next one: an idle worker costs nothing, and a busy one about as many calls as the link can do.
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
from rollart.distributed.wire import Died, Message, decode, encode
from rollart.ports.factory import load
from rollart.ports.worker import Worker
from rollart.types.messages import WorkerCommand, WorkerEvent, WorkerInfo

TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
COMMANDS, EVENTS = "commands", "events"
"""Concurrency groups of one thread each: `poll` waits without holding up `give`, and each keeps its order."""


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
        self._outbox = Outbox()
        self._drive = Drive(order.worker, _builder(order), time.monotonic, self._outbox)
        self._thread = threading.Thread(target=self._drive.run, name=f"{order.role}:{order.worker}", daemon=True)
        self._thread.start()

    @ray.method(concurrency_group=COMMANDS)  # type: ignore[untyped-decorator]
    def give(self, blob: bytes) -> None:
        """Commands for the worker. Nobody waits for the answer, so an error here is told as a death."""
        try:
            self._drive.give(cast("list[WorkerCommand]", decode(blob)))
        except msgspec.MsgspecError as error:
            self._outbox.died(f"a command did not arrive whole: {error}")

    @ray.method(concurrency_group=EVENTS)  # type: ignore[untyped-decorator]
    def poll(self) -> bytes:
        """What the worker says next; waits for it."""
        return encode(self._outbox.take())

    def end(self) -> None:
        """Close the worker and wait until it is closed."""
        self._drive.end()
        self._thread.join()


class Outbox:
    """What the worker said and nobody has taken yet. A death is the last of it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        self._over = False

    def joined(self, info: WorkerInfo) -> None:
        self._add([info])

    def events(self, events: list[WorkerEvent]) -> None:
        self._add(events)

    def died(self, reason: str) -> None:
        self._add([Died(reason)], last=True)

    def take(self) -> list[Message]:
        with self._changed:
            while not self._messages:
                self._changed.wait()
            messages, self._messages = self._messages, []
            return messages

    def _add(self, messages: Sequence[Message], *, last: bool = False) -> None:
        with self._changed:
            if not self._over:
                self._messages.extend(messages)
                self._over = last
                self._changed.notify()


def _builder(order: Order) -> Callable[[Callable[[], None]], Worker]:
    def build(wake: Callable[[], None]) -> Worker:
        factory = load(order.factory)
        settings = {key: pickle.loads(value) for key, value in order.settings.items()}
        return cast("Worker", factory(settings, wake))

    return build


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
