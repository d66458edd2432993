"""Who can reach the nodes of a cluster: nobody on the public network, and nobody without the token.

What Ray 2.60 answers without the token: whether a process is alive (`grpc.health.v1.Health`), and nothing else.
"""

import json

from controllers import Controller
from open_ports import check_ports, probed
from ray_nodes import PORT

NODES = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"


def test_nothing_answers_in_public_and_nothing_serves_without_the_token(cluster, record_property):
    with Controller(cluster) as controller:
        for kind in cluster.kinds[1:]:
            controller.spawn(f"reward/{kind}/0.0", kind)
        rows = check_ports(cluster)
        record_property("ports", json.dumps(rows))
        print(*rows, sep="\n")  # noqa: T201 - with `pytest -s`, for docs/cluster.md
        kinds = {what for *_, what in rows}
        assert any("CoreWorkerService" in what for what in kinds)
        assert any("NodeManagerService" in what for what in kinds)
        assert any("ObjectManagerService" in what for what in kinds)
        assert any(what.startswith("link") for what in kinds)
        assert any(what.startswith("HTTP") for what in kinds)
        # The probe is one that would get through: with the token it is served.
        asked = {"grpc": [cluster.head.address, PORT], "methods": [NODES]}
        assert probed(cluster.head, **asked, token=cluster.token) == {NODES: 0}
        assert probed(cluster.head, **asked, token="0" * 64) == {NODES: 16}
        assert not controller.deaths()
        controller.spawn("reward/after/0.0", "H20")


def test_torch_listens_on_the_interface_of_the_cluster_and_other_code_where_it_wants(cluster):
    node = cluster.nodes[-1]
    script = """
import os, socket, subprocess, sys
from rollart.distributed.one_interface import bind_this_process
from torch.distributed import TCPStore
bind_this_process(sys.argv[1])
stores = [TCPStore(sys.argv[1], 0, is_master=True, wait_for_workers=False, use_libuv=libuv) for libuv in (True, False)]
other = socket.create_server(("", 0))
ports = [store.port for store in stores] + [other.getsockname()[1]]
found = subprocess.run(["ss", "-H", "-ltn"], capture_output=True, text=True).stdout
print(*[line.split()[3] for port in ports for line in found.splitlines() if f":{port} " in line], sep="\\n")
"""
    *stores, other = node.python("-c", script, node.address).split()
    assert [store.rpartition(":")[0].strip("[]").removeprefix("::ffff:") for store in stores] == [node.address] * 2
    assert other.startswith("0.0.0.0:")
