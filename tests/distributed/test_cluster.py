"""Worker and Cluster on several raylets: modes, futures, errors, placement, and ranks that are lost."""

import os
import queue
import signal
import threading
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from ray_workers import runs, wait_until
from trial_nodes import kill_raylet, trial_nodes

from rollart.distributed.cluster import Cluster, Partition
from rollart.distributed.ray_placement import read_nodes
from rollart.distributed.worker import Worker, register
from rollart.types.errors import RankError, RankLost, RequestError
from rollart.types.placement import ACCELERATOR, Needs

PATIENCE_S = 100.0
pytestmark = pytest.mark.usefixtures("nodes")


class Adder(Worker):
    def __init__(self, start, fail_at=None):
        if self.rank == fail_at:
            raise ValueError(f"no start {start}")
        self.total = start
        self.opened = threading.Event()

    @register(mode="shard")
    def add(self, numbers, times=1):
        self.total += times * sum(numbers)
        return self.total

    @register(mode="shard")
    def doubled(self, numbers):
        return [2 * number for number in numbers]

    @register()
    def who(self):
        return self.rank, self.ranks, self.address, self.node, os.getpid()

    @register(mode="execute_rank_zero")
    def first(self):
        return self.rank, self.total

    @register()
    def fail(self, rank):
        if self.rank == rank:
            raise KeyError("lost key")
        self.opened.wait()

    @register(beside=True)
    def open(self):
        self.opened.set()

    def private(self):
        pass


@pytest.fixture(scope="module")
def nodes():
    with trial_nodes("cpu=2,H800=1", cpus=3) as cluster:
        yield cluster


def test_every_registered_method_is_one_of_the_cluster():
    with Cluster(Adder, 3, 100) as adders:
        found = adders.who()
        assert [(rank, ranks, address) for rank, ranks, address, _, _ in found] == [
            (rank, 3, "127.0.0.1") for rank in range(3)
        ]
        assert len({pid for *_, pid in found}) == 3
        assert adders.add([1, 2, 3, 4, 5, 6]) == [103, 107, 111]
        assert adders.add(Partition([[1], [10], [100]]), times=2) == [105, 127, 311]
        assert adders.doubled([1, 2, 3, 4]) == [2, 4, 6, 8]  # gathered in order
        assert adders.first() == (0, 105)
        with pytest.raises(AttributeError, match="decorate it with @register"):
            adders.private()
        with pytest.raises(RequestError, match="2 elements cannot be split over 3"):
            adders.add(Partition([[1], [2]]))
        pids = [pid for *_, pid in found]
    wait_until(lambda: not any(runs(pid) for pid in pids))


def test_a_pending_call_is_not_waited_for_and_others_run_beside_it():
    with Cluster(Adder, 2, 0) as adders:
        waits = adders.fail.start(rank=None)
        later = adders.add.start([1, 2])
        with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] have not answered"):
            waits.result(timeout_s=0.5)
        assert not later.done()  # calls keep their order
        adders.open()
        assert waits.result(PATIENCE_S) == [None, None]
        assert later.result(PATIENCE_S) == [1, 2]


def test_an_error_names_rank_node_and_cause_without_waiting_for_others():
    with Cluster(Adder, 2, 0) as adders:
        with pytest.raises(RankError, match=r"rank 1 \(node 127.0.0.1 .*\): KeyError: 'lost key'") as raised:
            adders.fail(1)  # rank 0 waits for ever
        assert not isinstance(raised.value, RankLost)
        assert isinstance(raised.value.__cause__, KeyError)
        adders.open()
        assert adders.add([5, 7]) == [5, 7]  # all ranks live
    with pytest.raises(RankError, match=r"rank 1 .*no start 7"):
        Cluster(Adder, 2, 7, fail_at=1)


def test_a_rank_that_is_killed_is_noticed_at_once(tmp_path):
    lost = queue.SimpleQueue()
    log = str(tmp_path / "rank-{rank}.log")
    Path(log.format(rank=2)).write_text("its last words")
    with Cluster(Adder, 3, 0, first=1, log=log, on_lost=lambda rank, error: lost.put((rank, error))) as adders:
        *_, pid = adders.who()[1]
        waits = adders.fail.start(rank=None)
        os.kill(pid, signal.SIGKILL)
        rank, error = lost.get(timeout=PATIENCE_S)
        assert rank == error.rank == 2
        with pytest.raises(
            RankLost, match=r"rank 2 \(node .*\): its process ended without an error: killed.*last words"
        ):
            waits.result(PATIENCE_S)
        with pytest.raises(RankLost, match="rank 2"):
            adders.add([1])
    assert lost.empty()  # closing loses none


def test_ranks_reserve_what_they_need_on_as_many_nodes_as_it_takes():
    with Cluster(Adder, 5, 0, needs=Needs(cpus=1)) as adders:
        places = [node for *_, node, _ in adders.who()]
        assert 2 <= len(set(places)) <= 3
        assert max(places.count(place) for place in places) <= 3
        with pytest.raises(RequestError, match=r"5 ranks need 1 CPU each; the cluster has .*2 × cpu with 3 CPUs"):
            Cluster(Adder, 5, 0, needs=Needs(cpus=1), place_s=0.0)
    with Cluster(Adder, 3, 0, needs=Needs(cpus=1, labels={ACCELERATOR: "H800"})) as adders:
        (only,) = {node for *_, node, _ in adders.who()}
        assert {node.id: node.labels for node in read_nodes()}[only][ACCELERATOR] == "H800"
    with Cluster(Adder, 3, 0, needs=Needs(cpus=1), strategy="SPREAD") as adders:
        assert len({node for *_, node, _ in adders.who()}) >= 2  # the ranks before may just be ending


def test_a_node_that_is_killed_is_noticed():
    lost = queue.SimpleQueue()
    needs = Needs(cpus=1, labels={ACCELERATOR: "H800"})
    with Cluster(Adder, 2, 0, needs=needs, on_lost=lambda rank, error: lost.put((rank, str(error)))) as adders:
        node = adders.nodes[1].id
        kill_raylet(node)
        found = dict(lost.get(timeout=PATIENCE_S) for _ in range(2))
        assert found.keys() == {0, 1}
        assert node[:6] in found[1]
