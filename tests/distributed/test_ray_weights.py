"""The weight store between nodes, on three nodes of a real Ray: its promises, and what is killed."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from ray.exceptions import RayActorError
from weight_nodes import RemoteStore, gone, kill, living, nodes, raylet_of, result, user, wait_until

from rollart.bench.ray_weights import measure_weights
from rollart.conformance.case import NotApplicable
from rollart.conformance.weights import CASES, WeightStoreHarness, make
from rollart.distributed import trial_cluster
from rollart.distributed.ray_weights import ray_weights
from rollart.types.errors import DigestMismatch, VersionMissing, WeightError
from rollart.types.versions import Version

V = [Version(0, step) for step in range(12)]
SHM = Path("/dev/shm")
numbers = count()


@pytest.fixture(scope="module")
def cluster():
    with nodes(3) as (cluster, ids):
        yield cluster, ids


def fresh():
    return ray_weights(f"test-{os.getpid()}-{next(numbers)}", slot_bytes=1 << 16, adapter_bytes=1 << 15)


@pytest.fixture
def store(cluster):  # noqa: ARG001 - it is connected to it
    with fresh() as store:
        yield store


@pytest.fixture
def others(cluster):
    """Ids of the nodes without the controller. One of them may have been replaced by an earlier test."""

    def found():
        nodes = [node for node in living() if node != cluster[1][0]]
        return nodes if len(nodes) == 2 else None

    return wait_until(found)


def folders(store):
    return list(SHM.glob(f"rollart-{store._run}-*"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(case, store, others):
    """With a publisher on one node and a reader on another."""
    publisher, reader = RemoteStore(store, others[0]), RemoteStore(store, others[1])

    def corrupt(version, index):
        reader.bucket(version, index)  # so that it is there
        data = bytes(publisher.bucket(version, index))
        for slot in SHM.glob(f"rollart-{store._run}-*/slot-*"):
            held = bytearray(slot.read_bytes())
            at = held.find(data)
            if at >= 0:
                with slot.open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([data[0] ^ 1]))

    try:
        case.run(WeightStoreHarness(store=publisher, corrupt=corrupt, reopen=lambda: reader))
    except NotApplicable as reason:
        pytest.skip(str(reason))


def test_a_node_has_one_holder_that_fetches_ahead(store, others):
    trainer, engines = user(store, others[0]), [user(store, others[1]) for _ in range(3)]
    result(trainer.publish.remote(V[1]))
    assert [result(engine.read.remote(V[1])) for engine in engines] == [make(V[1])[1]] * 3
    assert len({result(engine.holder.remote()) for engine in engines}) == 1
    result(trainer.publish.remote(V[2]))  # no engine asks for it
    wait_until(lambda: set(store.nodes_of(V[2])) == set(others))
    assert len(folders(store)) == 2


def test_a_version_outlives_its_trainer(store, others):
    trainer = user(store, others[0])
    result(trainer.publish.remote(V[1]))
    holder = result(trainer.holder.remote())
    kill(result(trainer.pid.remote()))
    engine = user(store, others[1])
    assert result(engine.read.remote(V[1])) == make(V[1])[1]
    assert result(engine.call.remote("newest")) == V[1]
    assert not gone(holder)


def test_a_node_that_leaves_has_no_holder_any_more_and_its_versions_stay(store, others):
    """Also one that only that node had; a second release, or that of a node without a holder, has no effect."""
    trainer = user(store, others[0])
    result(trainer.publish.remote(V[1]))
    holder = result(trainer.holder.remote())
    assert store.nodes_of(V[1]) == [others[0]]
    for _ in range(2):
        store.release(others[0])
        wait_until(lambda: gone(holder))
        assert others[0] not in store.nodes_of(V[1])
    store.release(others[1])
    assert result(user(store, others[1]).read.remote(V[1])) == make(V[1])[1]


@pytest.mark.parametrize("buckets", [0, 1, 2])
def test_a_trainer_killed_in_the_middle_publishes_nothing(store, others, buckets):
    engine, trainer = user(store, others[1]), user(store, others[0])
    result(trainer.publish.remote(V[1]))
    assert result(engine.read.remote(V[1])) == make(V[1])[1]
    with pytest.raises(RayActorError):
        result(trainer.publish.remote(V[2], dies_after=buckets))
    assert store.newest() == V[1]
    with pytest.raises(VersionMissing):
        store.manifest(V[2])
    restarted = user(store, others[1])  # elsewhere
    for step in range(1, 5):  # more than the slots would hold, had the draft kept one
        result(restarted.publish.remote(Version(1, step)))
        assert result(engine.read.remote(Version(1, step))) == make(Version(1, step))[1]


def test_a_killed_holder_is_replaced_and_fetches_again(store, others):
    trainer, engine = user(store, others[0]), user(store, others[1])
    result(trainer.publish.remote(V[1]))
    assert result(engine.read.remote(V[1])) == make(V[1])[1]
    for victim, node in ((engine, others[1]), (trainer, others[0])):  # with the copy of an engine, of the publisher
        killed = result(victim.holder.remote())
        kill(killed)
        wait_until(lambda node=node: node not in store.nodes_of(V[1]))
        late = user(store, node)
        assert result(late.read.remote(V[1])) == make(V[1])[1]
        assert result(late.holder.remote()) != killed
    result(trainer.publish.remote(V[2]))
    assert result(engine.read.remote(V[2])) == make(V[2])[1]


def test_the_last_copy_is_gone_with_its_holder_and_the_next_version_must_be_newer(store, others):
    trainer = user(store, others[0])
    result(trainer.publish.remote(V[3]))
    kill(result(trainer.holder.remote()))
    wait_until(lambda: store.newest() is None)
    with pytest.raises(VersionMissing):
        store.bucket(V[3], 0)
    with pytest.raises(WeightError, match="not newer"):
        result(trainer.publish.remote(V[2]))
    result(trainer.publish.remote(V[4]))
    assert result(user(store, others[1]).read.remote(V[4])) == make(V[4])[1]


def test_ranks_on_several_nodes_publish_their_buckets(store, others):
    first, second = user(store, others[0]), user(store, others[1])
    manifest, buckets = make(V[1])
    result(first.call.remote("begin", manifest))
    with pytest.raises(DigestMismatch):
        result(first.call.remote("put", V[1], 0, buckets[1][:64]))
    with pytest.raises(WeightError, match="digest"):  # found by the holder of the other node
        result(second.call.remote("put", V[1], 0, buckets[1][:64]))
    result(first.call.remote("put", V[1], 2, buckets[2]))
    result(second.call.remote("put", V[1], 1, buckets[1]))
    with pytest.raises(WeightError, match="lacks 1 of its 3"):
        result(first.call.remote("commit", V[1]))
    result(first.call.remote("begin", manifest))
    for rank, index in ((first, 2), (second, 0), (second, 1)):
        result(rank.call.remote("put", V[1], index, buckets[index]))
    assert store.newest() is None
    result(first.call.remote("commit", V[1]))
    assert result(second.read.remote(V[1])) == buckets


def test_a_commit_waits_for_buckets_of_other_ranks_and_not_for_those_that_were_given_up(store, others):
    first, second = user(store, others[0]), user(store, others[1])
    manifest, buckets = make(V[1])
    result(first.call.remote("begin", manifest))
    for index in (0, 2):
        result(first.call.remote("put", V[1], index, buckets[index]))
    with pytest.raises(WeightError, match="lacks 1 of its 3"):
        result(first.call.remote("commit", V[1], 0.1))
    result(first.call.remote("begin", manifest))
    commit = first.call.remote("commit", V[1], 3600.0)
    for index in range(3):
        assert store.newest() is None
        result(second.call.remote("put", V[1], index, buckets[index]))
    result(commit)
    assert store.newest() == V[1]
    manifest, buckets = make(V[2])
    result(first.call.remote("begin", manifest))
    commit = first.call.remote("commit", V[2], 3600.0)
    result(second.call.remote("abort", V[2]))
    with pytest.raises(WeightError, match=r"given up|is not being published"):
        result(commit)
    assert store.newest() == V[1]


def test_a_store_that_is_closed_says_so(others):
    with fresh() as store:
        engine = user(store, others[0])
        result(engine.publish.remote(V[1]))

    def refused(call):
        """Ray ends the registry asynchronously; until then it may answer."""
        try:
            result(call())
        except WeightError as error:
            return "is gone: its controller" in str(error)
        return False

    wait_until(lambda: refused(lambda: engine.call.remote("newest")))
    late = user(store, others[0])
    wait_until(lambda: refused(lambda: late.call.remote("bucket", V[2], 0)))
    assert not folders(store)


def test_the_measurement_of_transfers(cluster):  # noqa: ARG001 - it is connected to it
    measured = measure_weights(nbytes=3_000_000, pairs=2, readers=2)
    assert len(measured.version_s) == len(measured.tcp_s) == 2
    assert measured.over_tcp > 0


def test_a_stranger_gets_nothing(store, others):
    trainer = user(store, others[0])
    result(trainer.publish.remote(V[1]))
    address = store._ask("place", others[0], "").address
    for said in (b"", b"\0" * 48 + b"\0" * 32, b"GET / HTTP/1.1\r\n\r\n" * 8):
        with socket.create_connection(address, timeout=60) as link:
            answered = b""
            with suppress(OSError):  # the other side may have closed already
                link.sendall(said)
                link.shutdown(socket.SHUT_WR)
                while part := link.recv(4096):
                    answered += part
            assert len(answered) in (0, 64)  # nothing, or the challenge of the handshake


DRIVER = """
import sys, time
from pathlib import Path
from rollart.conformance.weights import make
from rollart.distributed import trial_cluster
from rollart.distributed.ray_cluster import RayCluster
from rollart.distributed.ray_weights import ray_weights
from rollart.types.versions import Version
import ray

trial_cluster.folder = lambda: Path(sys.argv[1])
with RayCluster(sys.argv[2]), ray_weights(sys.argv[3], slot_bytes=1 << 16) as store:
    store.publish(*make(Version(0, 1)))
    print(ray.get(store._place()[0].holder.ping.remote()), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_holders_end_with_the_controller(cluster, end):
    name = f"driver-{os.getpid()}-{end}"
    command = [sys.executable, "-c", DRIVER, str(trial_cluster.folder()), cluster[0].address, name]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    holder = int(driver.stdout.readline())
    assert not gone(holder)
    assert list(SHM.glob(f"rollart-{name}-*"))
    if end == "killed":
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    else:
        driver.communicate()
        assert driver.returncode == 0
        assert not list(SHM.glob(f"rollart-{name}-*"))
    wait_until(lambda: gone(holder))
    with fresh() as successor:  # reclaims what is left
        successor.publish(*make(V[1]))
        assert not list(SHM.glob(f"rollart-{name}-*"))


def test_a_dead_node_takes_only_its_own_copies(cluster, store, others):
    """It changes the nodes: at its end there are as many as before."""
    home, other = others
    trainer, engine = user(store, home), user(store, other)
    result(trainer.publish.remote(V[1]))
    assert result(engine.read.remote(V[1])) == make(V[1])[1]
    kill(raylet_of(home))
    wait_until(lambda: home not in living())
    wait_until(lambda: store.nodes_of(V[1]) == [other])
    assert [bytes(store.bucket(V[1], index)) for index in range(3)] == make(V[1])[1]
    moved = user(store, other)
    result(moved.publish.remote(Version(1, 2)))
    assert result(engine.read.remote(Version(1, 2))) == make(Version(1, 2))[1]
    trial_cluster.start_node(cluster[0], 1)
    (returned,) = wait_until(lambda: [node for node in living() if node not in (cluster[1][0], *others)])
    assert result(user(store, returned).read.remote(Version(1, 2))) == make(Version(1, 2))[1]
