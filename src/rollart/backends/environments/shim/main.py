"""Environments for a worker that has another interpreter: a thread for each, and one loop that reads commands.

    reader ──► thread of environment 1: build, reset, step, close ──┐
           ──► thread of environment 2                            ──┴─► Outbox ──► frames of answers

Commands and answers are JSON arrays, several to a frame:

    ["reset", id, {"id", "task", "seed", "data"}]    answered by [id, [observation, reward, done, …]]
    ["step", id, action]                             answered likewise
    ["call", id, method, arguments]                  answered by [id, value], null without such a method
    ["close", id]                                    not answered

or by [id, reason, permanent] if that failed. An environment has one command at a time; its id is used once.
"""

import json
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rollart.backends.environments.shim.player import Player, failure
from rollart.ports.factory import load, moved

READY = 0
"""Id of the message that follows the setup."""
LENGTH_BYTES = 4
CLOSE_S = 1.0
"""How long to wait for environments that are being closed when stdin has closed."""


class Outbox:
    """Writes messages of many threads to a pipe. What comes while one writes goes out together, as one frame."""

    def __init__(self, pipe: IO[bytes]) -> None:
        """`pipe` is unbuffered."""
        self._pipe = pipe
        self._waiting: deque[bytes] = deque()
        self._writing = threading.Lock()

    def put(self, message: bytes) -> None:
        """Write it now, or leave it to the thread that writes. Raises `OSError` if the pipe is broken or closed."""
        self._waiting.append(message)
        while self._waiting and self._writing.acquire(blocking=False):
            try:
                self._write()
            finally:
                self._writing.release()

    def _write(self) -> None:
        messages = []
        while self._waiting:
            messages.append(self._waiting.popleft())
        if not messages:
            return
        body = b"[" + b",".join(messages) + b"]"
        self.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)

    def write(self, data: bytes) -> None:
        """Write bytes as they are; not while others use `put`."""
        if self._pipe.closed:
            raise BrokenPipeError("the pipe is closed")
        left = memoryview(data)
        while left:
            left = left[self._pipe.write(left) :]

    def close(self, timeout_s: float) -> None:
        """Close the pipe, unless a thread has been writing for that long, because nothing is read."""
        if not self._writing.acquire(timeout=timeout_s):
            return
        try:
            with suppress(OSError):
                self._pipe.close()
        finally:
            self._writing.release()


class PlayingThread:
    """Plays one environment after the other; every call of an environment's code is made here."""

    def __init__(self, number: int, build: Callable[[], Any], outbox: Outbox, idle: "deque[PlayingThread]") -> None:
        self._jobs: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self.give = self._jobs.put
        self._outbox = outbox
        self._idle = idle
        self._player = Player(build)
        self._thread = threading.Thread(target=self._run, name=f"environment {number}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            kind, id, *arguments = self._jobs.get()
            if kind == "close":
                self._player.close()
                self._idle.append(self)
                continue
            try:
                if kind == "reset":
                    answer = [id, self._player.reset(arguments[0])]
                elif kind == "step":
                    answer = [id, self._player.step(arguments[0])]
                else:
                    answer = [id, self._player.call(*arguments)]
                message = json.dumps(answer, ensure_ascii=False, allow_nan=False).encode()
            except BaseException as error:  # noqa: BLE001 - the boundary of user code: its errors are attributed to it
                message = json.dumps([id, *failure(error)], ensure_ascii=False).encode(errors="replace")
            self._outbox.put(message)


def run(stream: IO[bytes], answers: int, setup: dict[str, Any]) -> None:
    """Load the environment's factory, then play until `stream` ends."""
    outbox = Outbox(os.fdopen(answers, "wb", buffering=0))
    try:
        for before, after in setup["moved"]:
            moved(Path(before), Path(after))
        factory = load(setup["factory"])
        if setup["try"]:
            Player(lambda: factory(**setup["settings"])).build_and_close()
    except BaseException as error:  # noqa: BLE001 - the boundary of user code
        outbox.put(json.dumps([READY, *failure(error)]).encode())
        return
    outbox.put(json.dumps([READY, None]).encode())
    play(commands(stream), outbox, lambda: factory(**setup["settings"]))


def play(commands: Iterator[list[Any]], outbox: Outbox, build: Callable[[], Any]) -> None:
    """Give every command to the thread of its environment."""
    playing: dict[int, PlayingThread] = {}
    idle: deque[PlayingThread] = deque()
    started = 0
    for command in commands:
        id = command[1]
        thread = playing.get(id)
        if command[0] == "close":
            playing.pop(id, None)
        elif thread is None:
            if idle:
                thread = idle.popleft()
            else:
                started += 1
                thread = PlayingThread(started, build, outbox, idle)
            playing[id] = thread
        if thread is not None:
            thread.give(command)
    for id, thread in playing.items():
        thread.give(["close", id])
    deadline = time.monotonic() + CLOSE_S
    while len(idle) < started and time.monotonic() < deadline:
        time.sleep(0.01)


def commands(stream: IO[bytes]) -> Iterator[list[Any]]:
    """Commands of the worker, until it closes the stream."""
    while True:
        length = stream.read(LENGTH_BYTES)
        if len(length) < LENGTH_BYTES:
            return
        yield from json.loads(stream.read(int.from_bytes(length, "big")))
