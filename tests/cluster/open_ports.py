"""All listening sockets of the nodes of a cluster, and what they are to a stranger without the token."""

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import ray
from nodes import CLUSTER
from probe import STATUS
from ray_nodes import HERE

CORE = Path(ray.__file__).parent / "core/src/ray"
RUNTIME_ENV_PATH = "/get_or_create_runtime_env"
REFUSED = [status for status, name in STATUS.items() if name == "UNAUTHENTICATED"]
ABSENT = [status for status, name in STATUS.items() if name == "UNIMPLEMENTED"]


class Socket(NamedTuple):
    protocol: str
    host: str
    port: int
    process: str


def listening(node):
    """Sockets of a node that wait for connections or datagrams."""
    found = []
    for line in node.run("ss", "-H", "-ltunp").splitlines():
        protocol, _, _, _, address, _, *process = line.split(maxsplit=6)
        host, _, port = address.rpartition(":")
        title = process[0].split('"')[1] if process else "?"
        found.append(Socket(protocol, host.strip("[]").removeprefix("::ffff:"), int(port), title))
    return found


def methods():
    """All gRPC methods of Ray, from its binaries."""
    binaries = [(CORE / name).read_bytes() for name in ("gcs/gcs_server", "raylet/raylet")]
    names = {name.decode() for binary in binaries for name in re.findall(rb"/ray\.rpc\.[\w.]+/\w+", binary)}
    assert len(names) > 100
    return sorted(names)


def probed(node, **settings):
    return json.loads(node.run(sys.executable, HERE / "probe.py", json.dumps(settings)))


def refusal(stranger, host, port):
    """What a port is, if it refuses all service without the token; fails otherwise."""
    found = probed(stranger, grpc=[host, port], methods=methods())
    if refused := [name for name, status in found.items() if status in REFUSED]:
        served = {name: status for name, status in found.items() if status not in REFUSED + ABSENT}
        assert not served, f"{host}:{port} serves without the token: {served}"
        return "gRPC " + ", ".join(sorted({name.split("/")[1].removeprefix("ray.rpc.") for name in refused}))
    assert set(found.values()) == {-1}, f"{host}:{port} is gRPC, but without a known method: {found}"
    if probed(stranger, link=[host, port])["closes"]:
        return "link of a run's workers to their controller"
    assert probed(stranger, http=[host, port], path=RUNTIME_ENV_PATH)["status"] == 401
    return "HTTP agent that prepares the environment of workers"


def check_ports(cluster):
    """Nothing listens on the public interfaces, and everything refuses a stranger; returns rows of what there is.

    The strangers: a machine on the public network, and one of the cluster's network without the token.
    """
    rows, public = [], []
    for number, node in enumerate(cluster.nodes):
        sockets = listening(node)
        assert sockets
        for socket in sockets:
            assert socket.host in (node.address, "127.0.0.1", "::1"), f"{socket} is open to other networks"
            public.append((node.public_address, socket.port))
            if socket.host == node.address:
                assert socket.protocol == "tcp"
                what = refusal(node, node.address, socket.port)
                rows.append((f"node {number}", socket.port, socket.process, what))
    answers = probed(cluster.outside, connect=public)
    assert not any(answers.values()), answers
    reachable = probed(cluster.nodes[-1], connect=[(cluster.head.address, port) for _, port, *_ in rows[:1]])
    assert all(reachable.values()), f"the probe itself does not work on {CLUSTER}"
    return rows
