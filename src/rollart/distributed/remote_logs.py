"""Output of processes on any node, in the controller's run folder.

    process ──► <temporary>/rollart-<user>/logs/<session>/<name>.log ──(LogForwarder)──► <run folder>/logs/<name>.log

On the controller's node a process writes to the run folder itself. Invariants: a process never waits for its log to be
sent, but for `FLUSH_S` at its end. After a SIGKILL, what was not sent yet is still on its node, and `collect` sends it.
Sending is bounded to `APPEND_BYTES` per `INTERVAL_S`.
"""

import asyncio
import faulthandler
import logging
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollart.distributed.log_files import APPEND_BYTES, log_on_node, remove_log
from rollart.distributed.ray_files import Home
from rollart.ports.folder_transfer import node_folder

INTERVAL_S = 0.25
SEND_S = 5.0
FLUSH_S = 2.0
COLLECT_S = 3.0
"""How long the report of a death waits for the last lines of the process."""
LOGS = "logs"
KEPT_S = 7 * 86400.0
"""How long a node keeps logs that were not sent."""


def redirect(log: Path, name: str, home: Home | None) -> "LogForwarder | None":
    """Redirect everything this process prints, native code included, to its log in the controller's run folder.

    `log` is its path there. On another node than `home` it goes through a file of that node; the forwarder is
    returned, to be closed at the end.
    """
    forwarder = None if home is None or home.is_here() else LogForwarder(home, name)
    _write_to(log if forwarder is None else forwarder.path)
    if forwarder is not None:
        forwarder.start()
    return forwarder


class LogForwarder:
    """Sends what is appended to the log of this process."""

    def __init__(self, home: Home, name: str) -> None:
        self._home = home
        self._name = name
        self._root = node_folder(LOGS)
        self.path = log_on_node(self._root, home.actor, name)
        self._sent = 0
        self._actor: Any = None
        self._sending = threading.Lock()
        self._over = threading.Event()

    def start(self) -> None:
        _remove_old(self._root, self._home.actor)
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def close(self, within_s: float = FLUSH_S) -> None:
        """Send what is left; then the file on this node is removed."""
        self._over.set()
        deadline = time.monotonic() + within_s
        while not self._send(within_s=max(0.1, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                return  # the file stays on the node
        remove_log(self.path, self._root)

    def _run(self) -> None:
        self._send(empty=True)  # so that a silent worker has a log too
        while not self._over.wait(INTERVAL_S):
            self._send()

    def _send(self, *, empty: bool = False, within_s: float = SEND_S) -> bool:
        """Send the next lines; returns whether there were none."""
        with self._sending:
            lines = self._next_lines()
            if not lines and not empty:
                return True
            try:
                self._actor = self._actor or self._home.handle()
                self._sent = ray.get(self._actor.append_log.remote(self._name, self._sent, lines), timeout=within_s)
            except (RayError, ValueError):  # a cut, or the controller is gone; its log must not fill with it
                self._actor = None
            return False

    def _next_lines(self) -> bytes:
        try:
            with self.path.open("rb", buffering=0) as file:
                return os.pread(file.fileno(), APPEND_BYTES, self._sent)
        except FileNotFoundError:
            return b""


def _remove_old(root: Path, own: str) -> None:
    """Remove logs that killed processes of earlier sessions left on this node."""
    for session in root.iterdir():
        if session.name != own and _last_write(session) < time.time() - KEPT_S:
            shutil.rmtree(session, ignore_errors=True)


def _last_write(folder: Path) -> float:
    with suppress(FileNotFoundError):  # another process removes it
        return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    return time.time()


async def collect(home: Home, name: str, node: str) -> None:
    """Send what a process that was killed left in its log on this node; best effort, within `COLLECT_S`."""
    if node == home.node:
        return
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    try:
        async with asyncio.timeout(COLLECT_S):
            await _SEND_REST.options(scheduling_strategy=there).remote(home, name)
    except (TimeoutError, RayError):  # the node is gone too, or slow: the lines come later, or never
        pass


def _send_rest(home: Home, name: str) -> None:
    LogForwarder(home, name).close()


_SEND_REST = ray.remote(num_cpus=0, max_retries=0)(_send_rest)


def _write_to(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    faulthandler.enable(file=2)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
