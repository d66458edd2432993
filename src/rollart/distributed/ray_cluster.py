"""Connection to a Ray cluster that exists, for one controller.

The controller runs on a node of the cluster. Invariants: it never starts a Ray, and what it started there ends with it,
because workers and placement groups belong to its connection. When the head of the cluster does not answer any more,
or the raylet of its own machine is gone, `lost` says so; Ray itself would exit this process after a minute, without an
explanation.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

import ray
import ray._private.services as ray_services
from ray.exceptions import RayError

from rollart.distributed import one_interface, trial_cluster
from rollart.distributed.code_travel import Code
from rollart.distributed.ray_local import LAST_RESORT_S, environment, tamed
from rollart.distributed.ray_placement import read_nodes
from rollart.distributed.ray_process import TOKEN_VARIABLE
from rollart.types.errors import RequestError, RunError, RuntimeLost

LOOK_S = 1.0
SILENT_S = 20.0
"""How long the head of the cluster may be out of reach. Longer than a short cut of its network."""
REFUSALS = 3
"""Consecutive looks at which the raylet of this machine does not answer, after which it is gone."""
AUTO = "auto"
OWN_RUNTIME_ENV = "RAY_OVERRIDE_JOB_RUNTIME_ENV"
"""In a Ray Job, the code that this process sends replaces that of the job, which is a copy of it."""


class RayCluster:
    """Context manager that connects to a cluster. Enter it in the main thread, before the event loop."""

    def __init__(self, address: str, code: Code | None = None) -> None:
        """`address` is `HOST:PORT` of the cluster's head, or `auto`: the trial cluster, or that of this node.

        `code` travels to its nodes; without it nothing can be started there.
        """
        self.code = code
        self.advice = ""
        """Appended to the message with which this process exits if it hangs in a call into a lost Ray."""
        self._trial = trial_cluster.read()
        if address == AUTO and self._trial is not None:
            address = self._trial.address
        elif self._trial is not None and address != self._trial.address:
            self._trial = None
        self._address = address
        self._cause = ""
        self._act: Callable[[], None] = lambda: None
        self._leaving = threading.Event()
        self._left = threading.Event()

    def __enter__(self) -> Self:
        if ray.is_initialized():
            raise RequestError("this process is already connected to a Ray; close that connection first")
        try:
            token = {} if self._trial is None else {TOKEN_VARIABLE: self._trial.token}
            with environment({"RAY_AUTH_MODE": "token", OWN_RUNTIME_ENV: "1"} | token), tamed():
                self._connect()
        except (OSError, RayError, RuntimeError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RequestError(
                f"--address {self._address}: cannot connect to this Ray ({reason}); is it up, is this machine one of "
                "its nodes, and is its token in RAY_AUTH_TOKEN? `rollart cluster up` starts one for trials"
            ) from error
        self.head = ray.get_runtime_context().gcs_address
        self._raylet = _own_raylet()
        threading.Thread(target=self._guard, name="ray guard", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leaving.set()
        ray.shutdown()
        self._left.set()

    @property
    def is_trial(self) -> bool:
        """Whether it is the trial cluster of this machine, whose GPUs need not exist."""
        return self._trial is not None

    def lost(self) -> str:
        """Why the cluster is lost, as a clause; empty while it is there. Thread-safe."""
        return self._cause

    def when_lost(self, act: Callable[[], None]) -> None:
        """Set the callback to call, from another thread, once the cluster is lost; replaces the previous one."""
        self._act = act
        if self._cause:
            act()

    def _connect(self) -> None:
        address = ray_services.canonicalize_bootstrap_address(self._address)
        if address is None or not _answers(address):  # Ray would try for minutes
            raise ConnectionError("nothing answers there")
        host, _, port = address.rpartition(":")
        node_ip = one_interface.address_towards(host.strip("[]"), int(port))
        one_interface.bind_this_process(node_ip)
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=None if self.code is None else self.code.runtime_env(),
            _node_ip_address=node_ip,
        )

    def _guard(self) -> None:
        """Notice that the head is gone, and exit this process if it then hangs in a call into Ray."""
        silent_s = 0.0
        refusals = 0
        while not self._leaving.wait(LOOK_S):
            silent_s = 0.0 if _answers(self.head) else silent_s + LOOK_S
            refusals = 0 if _answers(self._raylet) else refusals + 1
            if silent_s >= SILENT_S:
                self._cause = f"the head of the Ray cluster, {self.head}, has not answered for {SILENT_S:g} s"
            elif refusals >= REFUSALS:
                self._cause = f"the Ray node of this controller, {self._raylet}, is gone"
            if self._cause:
                self._act()
                if not self._left.wait(LAST_RESORT_S):
                    sys.stderr.write(f"rollart: {RuntimeLost.__name__}: {self._cause}. {self.advice}\n")
                    sys.stderr.flush()
                    os._exit(1)
                return


def wait_for_nodes(address: str, number: int, timeout_s: float) -> list[str]:
    """Names of the nodes, once there are as many; the head may still be starting, too."""
    deadline = time.monotonic() + timeout_s
    found: list[str] = []
    while True:
        try:
            with RayCluster(address):
                while True:
                    found = [node.name for node in read_nodes()]
                    if len(found) >= number:
                        return found
                    _pause(deadline, f"{len(found)} of {number} nodes are up: {', '.join(found)}")
        except RequestError as error:  # no head yet
            _pause(deadline, str(error))


def _pause(deadline: float, state: str) -> None:
    if time.monotonic() > deadline:
        raise RunError(f"the cluster is not complete: {state}")
    time.sleep(LOOK_S)


def _own_raylet() -> str:
    id = ray.get_runtime_context().get_node_id()
    own = next(node for node in ray.nodes() if node["NodeID"] == id)
    return f"{own['NodeManagerAddress']}:{own['NodeManagerPort']}"


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK_S):
        return True
    return False
