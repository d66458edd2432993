"""A private Ray instance on this machine, for one controller.

Invariants: it never joins another Ray; none of its processes listens on an address reachable from other machines, and
connecting to it needs its token, which only its own processes have; when the controller ends, however it ends, all of
its processes end (`ray_reaper`), at the latest before the next one starts on this machine.

Ray does not survive the death of its raylet or GCS: calls then wait for an answer that never comes, and after a minute
without a GCS Ray exits this process without an explanation. `LocalRay.lost` reports it within a second, for the runtime
to fail; if a call into Ray still blocks, a thread exits this process after `LAST_RESORT_S`.
"""

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
import ray._private.ray_constants as ray_constants
import ray._private.services as ray_services
import ray._private.worker as ray_worker
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # of a compiled module

from rollart.distributed import ray_reaper
from rollart.distributed.node_environment import ENVIRONMENT
from rollart.distributed.ray_process import TOKEN_VARIABLE
from rollart.types.errors import RequestError, RunError, RuntimeLost

OBJECT_STORE_BYTES = 256 * 2**20
"""For messages too large for a call. Weights take another path; memory is allocated as it is used."""
LOOPBACK = "127.0.0.1"
VITAL = {ray_constants.PROCESS_TYPE_GCS_SERVER: "GCS server", ray_constants.PROCESS_TYPE_RAYLET: "raylet"}
"""Processes that Ray cannot live without. The GCS first: its death takes the raylet down."""
LOOK_S = 0.2
LAST_RESORT_S = 15.0
"""Time that this process has to close after the death of its Ray."""


class LocalRay:
    """Context manager that runs Ray. Enter it in the main thread, before the event loop.

    The thread that starts Ray must outlive it: the kernel ends Ray's processes with that thread.
    """

    def __init__(self, *, logs: Path | None = None, advice: str = "") -> None:
        """`logs` receives the logs of a Ray that died; `advice` is appended to the last-resort message."""
        self._logs = logs
        self._advice = advice
        self._cause = ""
        self._act: Callable[[], None] = _nothing
        self._leaving = threading.Event()
        self._left = threading.Event()

    def __enter__(self) -> Self:
        if ray.is_initialized():
            raise RequestError("this process is already connected to a Ray; close that connection first")
        # First: the workers of a controller that was killed may still write to the folder of its run.
        ray_reaper.reap_orphans(tempfile.gettempdir())
        # A short path, because Ray puts sockets there, whose paths are limited in length.
        self.folder = tempfile.mkdtemp(prefix=ray_reaper.PREFIX)
        self._owner = ray_reaper.own(self.folder)
        reaper = [sys.executable, "-I", "-S", ray_reaper.__file__, self.folder]
        self._reaper = subprocess.Popen(reaper, stdin=subprocess.PIPE, start_new_session=True)
        variables = {TOKEN_VARIABLE: secrets.token_hex(32), ray_reaper.MARK: self.folder}
        threading.Thread(target=self._guard, name="ray guard", daemon=True).start()
        try:
            # Workers inherit these from Ray; this process does not need them once Ray is up.
            with environment(ENVIRONMENT | variables), tamed():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _node_ip_address=LOOPBACK,
                    _temp_dir=self.folder,
                )
        except BaseException as error:
            self._close()
            if not isinstance(error, Exception):
                raise
            if self._cause:
                raise RuntimeLost(f"{self._cause} while it started") from error
            raise RunError(f"Ray did not start: {type(error).__name__}: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def lost(self) -> str:
        """Which process of Ray died and how, as a clause; empty while all are alive. Thread-safe."""
        if not self._cause and not self._leaving.is_set():
            self._cause = _death()
        return self._cause

    def when_lost(self, act: Callable[[], None]) -> None:
        """Set the callback to call, from another thread, once this Ray is lost; replaces the previous one."""
        self._act = act
        if self._cause:
            act()

    def _guard(self) -> None:
        """Exit this process with a message if it hangs in a call into a lost Ray."""
        while not self._leaving.wait(LOOK_S):
            if cause := self.lost():
                self._act()
                if not self._left.wait(LAST_RESORT_S):
                    sys.stderr.write(f"rollart: {RuntimeLost.__name__}: {cause}. {self._advice}\n")
                    sys.stderr.flush()
                    os._exit(1)
                return

    def _close(self) -> None:
        self.lost()
        self._leaving.set()
        if self._cause:
            self._keep_logs()
        ray.shutdown()
        nodes.clear()
        self._reaper.communicate()  # closes its input, upon which it kills what is left
        os.close(self._owner)
        self._left.set()

    def _keep_logs(self) -> None:
        """Copy the logs of its processes before its folder is removed."""
        if self._logs is None:
            return
        for log in Path(self.folder).glob("session_latest/logs/*"):
            if log.name.partition(".")[0] in VITAL:
                with suppress(OSError):  # diagnostics only
                    self._logs.mkdir(parents=True, exist_ok=True)
                    shutil.copy(log, self._logs)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process while the block runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _unchanged(host: str) -> str:
    return host


def _nothing(*_arguments: object, **_options: object) -> None:
    pass


nodes: list[Any] = []
"""The current Ray node, running or starting; it lists its processes as soon as they are started."""
_build_node = Node.__init__
_get_node = ray_services.get_node


def vital_processes() -> "list[tuple[str, subprocess.Popen[bytes]]]":
    """Processes of this Ray listed in `VITAL`, with their names there; empty before they are started."""
    started = [getattr(node, "all_processes", {}) for node in nodes]
    return [(name, info.process) for kinds in started for kind, name in VITAL.items() for info in kinds.get(kind, ())]


def _death() -> str:
    for name, process in vital_processes():
        code = process.poll()
        if code is not None:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return f"Ray's {name} (pid {process.pid}) of this run died ({how})"
    return ""


def _build_known_node(node: Any, *arguments: Any, **options: Any) -> None:
    nodes[:] = [node]
    _build_node(node, *arguments, **options)


def _get_living_node(*arguments: Any) -> Any:
    if cause := _death():
        raise RuntimeLost(cause)
    return _get_node(*arguments)


WEB_SERVER = "start_api_server"
TAMED = (
    # Replaces a loopback address by a reachable one.
    (ray_services, "resolve_ip_for_localhost", _unchanged),
    # Prints the death of a process to standard output, which belongs to the command; we report it ourselves.
    (ray_worker, "listen_error_messages", _nothing),
    (Node, "__init__", _build_known_node),
    # Polls for a raylet for half a minute, whether or not it is alive.
    (ray_services, "get_node", _get_living_node),
    # A web server, an autoscaler and a log monitor: three processes without a use here.
    (Node, WEB_SERVER, _nothing),
    (Node, "start_monitor", _nothing),
    (Node, "start_log_monitor", _nothing),
)
"""Patches for behaviour that Ray has no setting for, or reads only once, on import."""


@contextmanager
def tamed(*, web_server: bool = False) -> Iterator[None]:
    """Ray with the patches in `TAMED`; a head that takes jobs keeps its web server. Ray reads
    its settings and its token from the environment of now."""
    patches = [patch for patch in TAMED if not (web_server and patch[1] == WEB_SERVER)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()  # another Ray of this process had another token
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
