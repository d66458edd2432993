"""The machines that a run needs are enough for it, and are no more than it takes."""

import pytest

from rollart.app.compose import worker_specs
from rollart.app.launch.groups import NodeGroup, NodeSize, as_nodes, node_groups
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.policy.placement import plan
from rollart.types.errors import RequestError
from rollart.types.placement import ACCELERATOR

SIZE = NodeSize(gpus=8, cpus=32)


def config_of(pools, **keys):
    task = {"environments": 200, "environment_pool": "cpus" if "cpus" in pools else ""}
    return check(RunConfig, {"tasks": {"maze": task}, "pools": pools, **keys})


def placed(config, groups):
    asked = [(spec.name, spec.needs) for spec in worker_specs(config, None, None) for _ in range(spec.ranks)]
    return [each.why for each in plan(asked, as_nodes(groups))]


def test_engines_of_a_pool_share_machines_and_everything_fits():
    pools = {
        "H800": {"engines": 3, "ranks": 4, "accelerator": "H800", "memory_gb": 10},
        "H20": {"engines": 2, "ranks": 1, "labels": {"zone": "a"}},
        "cpus": {"engines": 0},
    }
    config = config_of(pools, trainer={"pool": "H800", "device": "cuda", "ranks": 4, "cpus": 2}, reward_pool="cpus")
    groups = node_groups(config, SIZE)
    assert groups == [
        NodeGroup("H800", 2, 1 + 1 + 4 * 2, 8, 20 * 10**9, {ACCELERATOR: "H800"}),
        NodeGroup("H20", 1, 2 + 1, 2, 0, {"zone": "a"}),
        NodeGroup("cpus", 1, 4 + 1 + 1, 0, 0, {}),  # four environment workers, a quarter for the reward, one spare
    ]
    assert not any(placed(config, groups))
    # One machine less of the fullest kind is not enough.
    fewer = [NodeGroup("H800", 1, 10, 8, 20 * 10**9, {ACCELERATOR: "H800"}), *groups[1:]]
    assert any(placed(config, fewer))


def test_workers_without_a_pool_have_machines_of_their_own():
    groups = node_groups(config_of({"local": {"engines": 2, "cpus": 4}}), NodeSize(gpus=0, cpus=5))
    assert [(group.name, group.nodes, group.cpus) for group in groups] == [("local", 2, 5), ("others", 2, 5)]


@pytest.mark.parametrize("pool", [{"ranks": 9}, {"cpus": 32}])
def test_a_worker_that_no_machine_has_room_for_is_refused(pool):
    with pytest.raises(RequestError, match=r"a worker of pool local needs .*set --gpus-per-node"):
        node_groups(config_of({"local": pool}), SIZE)
    node_groups(config_of({"local": {key: amount - 1 for key, amount in pool.items()}}), SIZE)
