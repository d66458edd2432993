"""A Ray of its own on this machine, for one controller.

What holds: it never joins another Ray; nothing of it listens on an address that other machines reach, and whoever
connects needs its token, which only its own processes know; when the controller ends, however it ends, all of its
processes end (`ray_reaper`), at the latest before the next one starts on this machine.
"""

import logging
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import ray
import ray._private.ray_constants as ray_constants
import ray._private.worker as ray_worker
from ray._private.node import Node
from ray._raylet import Config  # type: ignore[attr-defined]  # there, but compiled

from rollart.distributed import ray_reaper
from rollart.distributed.ray_process import TOKEN_VARIABLE
from rollart.types.errors import RequestError, RunError

OBJECT_STORE_BYTES = 256 * 2**20
"""For messages too large for a call. Weights do not pass here; memory is taken as it is used."""
LOOPBACK = "127.0.0.1"
TOKEN = secrets.token_hex(32)
"""One for all that this process starts: Ray remembers the first."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""One thread per process: workers share the cores, and more threads than cores are slower than few."""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # What nobody looks at costs processor time: metrics, timings of its event loops, events of tasks.
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    # Workers are what this machine is for; by default they give way to everything else.
    "RAY_worker_niceness": "0",
    **dict.fromkeys(THREADS, "1"),
}


class LocalRay:
    """Ray, up from `with` to the end of its block. Enter it in the main thread, before the event loop.

    The thread that starts Ray must live as long as Ray does: the kernel ends Ray's processes with it.
    """

    def __enter__(self) -> Self:
        if ray.is_initialized():
            raise RequestError("this process is already connected to a Ray; close that connection first")
        # Before anything else: the workers of a controller that was killed may still write to the folder of its run.
        ray_reaper.reap_orphans(tempfile.gettempdir())
        # Short, because Ray puts sockets there, whose paths have a limit.
        self.folder = tempfile.mkdtemp(prefix=ray_reaper.PREFIX)
        self._owner = ray_reaper.own(self.folder)
        reaper = [sys.executable, "-I", "-S", ray_reaper.__file__, self.folder]
        self._reaper = subprocess.Popen(reaper, stdin=subprocess.PIPE, start_new_session=True)
        variables = {TOKEN_VARIABLE: TOKEN, ray_reaper.MARK: self.folder}
        try:
            # Workers inherit these from Ray; to this process they are of no use once Ray is up.
            with _environment(ENVIRONMENT | variables), _tamed():
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
            raise RunError(f"Ray did not start: {type(error).__name__}: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        ray.shutdown()
        self._reaper.communicate()  # it ends what is left when its input is closed
        os.close(self._owner)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
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


def _nothing(*_arguments: object, **_options: object) -> None:
    pass


TAMED = (
    # It replaces a loopback address by one that other machines reach, unless it believes that there are none.
    (ray_constants, "ENABLE_RAY_CLUSTER", False),
    # It prints the death of a process to standard output, which belongs to the command; `died` tells of it.
    (ray_worker, "listen_error_messages", _nothing),
    # A web server, an autoscaler and a reader of logs: three processes without a use here.
    (Node, "start_api_server", _nothing),
    (Node, "start_monitor", _nothing),
    (Node, "start_log_monitor", _nothing),
)
"""What Ray has no setting for, or reads only once, when it is imported."""


@contextmanager
def _tamed() -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in TAMED]
    for owner, name, value in TAMED:
        setattr(owner, name, value)
    Config.initialize("")  # reads the environment again
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
