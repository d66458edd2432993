"""Placement of workers by Ray, where Ray does not answer for a while."""

import asyncio

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from ray.exceptions import RpcError

from rollart.distributed import ray_placement
from rollart.types.placement import Needs, Node

NODE = Node("a1", "10.0.0.1", {}, {"CPU": 4.0}, {"CPU": 4.0})


def test_a_worker_waits_while_the_cluster_does_not_answer(monkeypatch):
    answers = [RpcError("deadline exceeded"), [], RpcError("unavailable"), [NODE]]
    reservations = [RpcError("unavailable"), None, "reserved"]

    def read_nodes():
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def reserve(worker, needs, place, nodes):
        assert (worker, needs, place.node, nodes) == ("engine/a/0.0", Needs(cpus=1), "a1", [NODE])
        answer = reservations.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray_placement, "read_nodes", read_nodes)
    monkeypatch.setattr(ray_placement, "_reserve", reserve)
    monkeypatch.setattr(ray_placement, "LOOK_S", 0.0)
    waits = []
    assert asyncio.run(ray_placement.reserve("engine/a/0.0", Needs(cpus=1), waits.append)) == "reserved"
    assert waits[0] == "the cluster does not answer: deadline exceeded"
    assert waits[1].startswith("the cluster missing: needs 1 CPU")
    assert waits[-1] == "the cluster full: needs 1 CPU"
