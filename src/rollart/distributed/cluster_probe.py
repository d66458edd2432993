"""Runs `node_probe` on all nodes of a cluster concurrently, and serves their echo requests."""

import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollart.distributed import node_probe
from rollart.types.placement import Node

ANSWER_S = 180.0
"""A node that has not answered by then is reported; the first process on a busy node may take a minute."""


def probe_nodes(
    nodes: Sequence[Node], interpreters: Mapping[str, Mapping[str, Sequence[str]]], answer_s: float = ANSWER_S
) -> dict[str, dict[str, Any]]:
    """By node: its answer, or `{"problem": …}`. `interpreters`: by node, modules that each interpreter must have."""
    cloudpickle.register_pickle_by_value(node_probe)
    try:
        with _echo(ray.util.get_node_ip_address()) as address:
            return _ask(nodes, interpreters, address, time.monotonic() + answer_s)
    finally:
        cloudpickle.unregister_pickle_by_value(node_probe)


def _ask(
    nodes: Sequence[Node],
    interpreters: Mapping[str, Mapping[str, Sequence[str]]],
    address: tuple[str, int],
    deadline: float,
) -> dict[str, dict[str, Any]]:
    look = ray.remote(num_cpus=0, max_retries=0)(node_probe.look)
    calls = {}
    for node in nodes:
        wanted = {path: list(modules) for path, modules in interpreters.get(node.id, {}).items()}
        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        calls[node.id] = look.options(scheduling_strategy=there).remote({"echo": address, "interpreters": wanted})
    found: dict[str, dict[str, Any]] = {}
    for node_id, call in calls.items():
        try:
            found[node_id] = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
        except RayError as error:
            reason = (str(error).strip().splitlines() or [""])[-1] or type(error).__name__
            found[node_id] = {"problem": f"no process can be run there: {reason}"}
    return found


@contextmanager
def _echo(host: str) -> Iterator[tuple[str, int]]:
    """A server like those of the links: on the cluster's interface, at a free port. It answers a byte with the time."""
    with socket.create_server((host, 0)) as server:

        def serve() -> None:
            while True:
                try:
                    link, _ = server.accept()
                except OSError:  # closed
                    return
                threading.Thread(target=_tell_time, args=(link,), daemon=True).start()

        threading.Thread(target=serve, name="doctor echo", daemon=True).start()
        try:
            yield host, server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which `close` alone does not


def _tell_time(link: socket.socket) -> None:
    with suppress(OSError), link:
        link.settimeout(node_probe.CONNECT_S)
        while link.recv(1):
            link.sendall(f"{time.time():.9f}\n".encode())
