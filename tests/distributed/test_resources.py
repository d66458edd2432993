"""ResourceManager and routed calls on labelled raylets: bindings, fallback with reason, lost ranks."""

import os
import queue
import signal

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from ray_workers import wait_until
from trial_nodes import trial_nodes

from rollart.distributed.cluster import Cluster
from rollart.distributed.ray_placement import read_nodes
from rollart.distributed.resources import ResourceManager
from rollart.distributed.worker import Worker, hw_mapping, register
from rollart.types.errors import RequestError
from rollart.types.placement import ACCELERATOR, Needs

PATIENCE_S = 100.0
pytestmark = pytest.mark.usefixtures("nodes")


class Generator(Worker):
    @hw_mapping(hw_affinity={"FrozenLake": "H800", "default": "H20"})
    def generate(self, prompts, tag_name="default"):
        return [(prompt, self.rank, self.resource, tag_name) for prompt in prompts]

    @register()
    def facts(self):
        return self.resource, self.node, os.getpid()


@pytest.fixture(scope="module")
def nodes():
    with trial_nodes("cpu=1,H800=1,H20=1", cpus=4, gpus=2) as cluster:
        yield cluster


def kinds_of(cluster):
    labels = {node.id: node.labels.get(ACCELERATOR, "cpu") for node in read_nodes()}
    return [labels[node] for _, node, _ in cluster.facts()]


def test_ranks_are_bound_to_the_class_of_their_role():
    manager = ResourceManager({"H800": 2}, {"H20": 2})
    with (
        Cluster(Generator, 2, resources=manager, role="train", name="trainer") as trainer,
        Cluster(Generator, 1, resources=manager, role="generation") as generation,
        Cluster(Generator, 1, resources=manager, role="environment") as environment,
        Cluster(Generator, 1, resources=manager, role="reward") as reward,
    ):
        assert kinds_of(trainer) == ["H800", "H800"]
        assert kinds_of(generation) == ["H20"]
        assert [each[0] for each in (*environment.facts(), *reward.facts())] == ["CPU", "local"]
        assert kinds_of(reward) == ["cpu"]  # this process is on the head
        found = [(each.cluster, each.rank, each.resource, each.why) for each in manager.bindings]
        assert found == [
            ("trainer", 0, "H800", ""),
            ("trainer", 1, "H800", ""),
            ("Generator", 0, "H20", ""),
            ("Generator", 0, "CPU", ""),
            ("Generator", 0, "local", ""),
        ]
        assert trainer.bindings[1] == manager.bindings[1]
        assert (manager.free("H800"), manager.free("H20")) == (0, 1)
    assert manager.bindings == ()
    assert (manager.free("H800"), manager.free("H20")) == (2, 2)


def test_calls_go_to_the_class_of_their_tag():
    manager = ResourceManager({"H800": 2}, {"H20": 2})
    with Cluster(Generator, {"H800": 1, "H20": 2}, resources=manager) as generation:
        assert kinds_of(generation) == ["H800", "H20", "H20"]
        assert generation.generate(["a", "b"], tag_name="FrozenLake") == [
            ("a", 0, "H800", "FrozenLake"),
            ("b", 0, "H800", "FrozenLake"),
        ]
        assert generation.generate(["a", "b"]) == [("a", 1, "H20", "default"), ("b", 2, "H20", "default")]
        assert generation.routes["generate", "FrozenLake"].why == ""
    with Cluster(Generator, 1, resources=manager, role="generation") as generation:
        assert generation.generate(["a"], tag_name="FrozenLake") == [("a", 0, "H20", "FrozenLake")]
        assert generation.routes["generate", "FrozenLake"].why == "no rank on H800"
    with Cluster(Generator, 2, name="bound to nothing") as generation:
        assert [rank for _, rank, _, _ in generation.generate(["a", "b"])] == [0, 1]
        assert generation.routes["generate", "default"].why == "no rank on H20"


def test_a_class_that_is_full_or_missing_falls_back_with_the_reason():
    manager = ResourceManager({"H800": 1}, {"H20": 2})
    with Cluster(Generator, 2, resources=manager, role="train") as trainer:
        assert kinds_of(trainer) == ["H800", "H20"]
        assert [(each.wanted, each.resource, each.why) for each in trainer.bindings.values()] == [
            ("H800", "H800", ""),
            ("H800", "H20", "H800 full"),
        ]
        with pytest.raises(RequestError, match=r"2 ranks on H20 .*: 0 of 1 H800, 1 of 2 H20"):
            Cluster(Generator, 2, resources=manager, role="generation")
        assert len(manager.bindings) == 2  # the request that was refused has taken nothing
    # A class of the manager that no node has, and one that is not the manager's.
    manager = ResourceManager({"H200": 1, "H20": 1})
    with Cluster(Generator, {"H200": 1}, resources=manager) as generation:
        (binding,) = generation.bindings.values()
        assert (binding.resource, binding.why) == ("H20", "H200 missing")
        assert (manager.free("H200"), manager.free("H20")) == (1, 0)
        with pytest.raises(RequestError, match="found no nodes"):
            Cluster(Generator, {"H200": 1}, resources=manager, place_s=0.0)
    with Cluster(Generator, 1, resources=manager, role="train") as trainer:
        (binding,) = trainer.bindings.values()
        assert (binding.resource, binding.why) == ("H20", "H800 missing")


def test_calls_leave_the_class_whose_ranks_are_lost():
    manager = ResourceManager({"H800": 1}, {"H20": 1})
    lost = queue.SimpleQueue()
    both = {"H800": 1, "H20": 1}
    with Cluster(Generator, both, resources=manager, on_lost=lambda rank, _: lost.put(rank)) as generation:
        os.kill(generation.facts()[0][2], signal.SIGKILL)
        assert lost.get(timeout=PATIENCE_S) == 0
        assert generation.generate(["a"], tag_name="FrozenLake") == [("a", 1, "H20", "FrozenLake")]
        assert generation.routes["generate", "FrozenLake"].why == "no rank on H800"


def test_what_a_rank_reserves_may_be_said_by_class():
    manager = ResourceManager({"H20": 3}, needs={"H20": Needs(cpus=1)})
    with Cluster(Generator, 3, resources=manager, role="generation") as generation:
        assert kinds_of(generation) == ["H20"] * 3
    wait_until(lambda: all(node.free["CPU"] == node.total["CPU"] for node in read_nodes()))


def test_requests_that_make_no_sense_are_refused():
    manager = ResourceManager({"H20": 1})
    for arguments in (
        {"resources": manager, "role": "cook"},
        {"resources": manager, "role": "train", "needs": Needs(cpus=1)},
        {"role": "train"},
    ):
        with pytest.raises(RequestError):
            Cluster(Generator, 1, **arguments)
    for pool in ({"H20": 0}, {"CPU": 4}, {"local": 1}):
        with pytest.raises(RequestError, match="not a class with devices to count"):
            ResourceManager(pool)
