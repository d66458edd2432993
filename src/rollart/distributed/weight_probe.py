"""Processes on the nodes of a cluster that measure how fast a weight version reaches other nodes.

version   one node publishes; ends when every other node can read it
tcp       one plain stream of as many bytes, from the memory of the publisher's process to that of another node
"""

import socket
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollart.distributed.link import Address
from rollart.distributed.ray_calls import answer
from rollart.distributed.ray_placement import read_nodes
from rollart.distributed.ray_weights import RayWeightStore, ray_weights
from rollart.types.errors import RequestError
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind, bucket_digest

BUCKET_BYTES = 64 * 2**20
PIECE_BYTES = 2**20
ROOM_BYTES = 2**20
"""For the manifest and the alignment of buckets."""
SLOTS = 3
DEADLINE_S = 300.0


class Probe:
    """One process with as many bytes as a version has."""

    def __init__(self, store: RayWeightStore, nbytes: int) -> None:
        self._store = store
        self._bytes = bytearray(b"weights!" * -(-nbytes // 8))[:nbytes]
        sizes = [min(BUCKET_BYTES, nbytes - start) for start in range(0, nbytes, BUCKET_BYTES)]
        self._buckets = [memoryview(self._bytes)[at * BUCKET_BYTES :][:size] for at, size in enumerate(sizes)]
        self._sizes, self._digests = tuple(sizes), tuple(bucket_digest(bucket) for bucket in self._buckets)
        self._server: socket.socket | None = None

    def publish(self, version: Version) -> None:
        self._store.publish(Manifest(version, None, WeightKind.FULL, (), self._sizes, self._digests), self._buckets)

    def read(self, version: Version) -> None:
        """Return when this node has the version."""
        self._store.on_this_node(version).bucket(version, len(self._sizes) - 1)

    def listen(self) -> Address:
        self._server = socket.create_server((ray.util.get_node_ip_address(), 0))
        return ray.util.get_node_ip_address(), self._server.getsockname()[1]

    def receive(self) -> None:
        assert self._server is not None
        link, _ = self._server.accept()
        with link, memoryview(self._bytes) as place:
            start = 0
            while start < len(place):
                count = link.recv_into(place[start : start + PIECE_BYTES])
                if not count:
                    raise OSError("the stream ended early")
                start += count
            link.sendall(b"!")

    def send(self, address: Address) -> None:
        with socket.create_connection(address) as link, memoryview(self._bytes) as data:
            for start in range(0, len(data), PIECE_BYTES):
                link.sendall(data[start : start + PIECE_BYTES])
            link.recv(1)


class Transfers:
    """Probes on a publisher's node and on others. Use it while connected to a cluster with enough nodes."""

    def __init__(self, store: RayWeightStore, nbytes: int, nodes: Sequence[str]) -> None:
        """`nodes` are ids: the publisher's, then the readers'."""
        make = ray.remote(num_cpus=0)(Probe).options
        self._probes: list[Any] = [
            make(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(store, nbytes)
            for node in nodes
        ]
        self._address = answer(self._probes[1].listen.remote(), DEADLINE_S)
        self._step = 0
        for _ in range(SLOTS):  # every slot is mapped once
            self.version_s()

    def version_s(self) -> float:
        """Seconds from the start of a publication until all readers' nodes have the version."""
        publisher, *readers = self._probes
        self._step += 1
        version = Version(0, self._step)
        began = time.perf_counter()
        answer(publisher.publish.remote(version), DEADLINE_S)
        for reading in [reader.read.remote(version) for reader in readers]:
            answer(reading, DEADLINE_S)
        return time.perf_counter() - began

    def tcp_s(self) -> float:
        """Seconds of a plain stream of as many bytes, from the publisher to the first reader."""
        publisher, reader, *_ = self._probes
        began = time.perf_counter()
        receiving = reader.receive.remote()
        answer(publisher.send.remote(self._address), DEADLINE_S)
        answer(receiving, DEADLINE_S)
        return time.perf_counter() - began


def measure(run: str, nbytes: int, pairs: int, readers: int) -> list[tuple[float, float]]:
    """Interleaved pairs of `version_s` and `tcp_s`, between the first nodes of the cluster.

    The controller's node comes last: as a reader, or not at all.
    """
    own = ray.get_runtime_context().get_node_id()
    nodes = sorted((node.id for node in read_nodes()), key=lambda node: (node == own, node))
    if len(nodes) < readers + 1:
        raise RequestError(f"a publisher and {readers} readers need {readers + 1} nodes; the cluster has {len(nodes)}")
    with ray_weights(run, slot_bytes=nbytes + ROOM_BYTES, slots=SLOTS) as store:
        transfers = Transfers(store, nbytes, nodes[: readers + 1])
        return [(transfers.version_s(), transfers.tcp_s()) for _ in range(pairs)]
