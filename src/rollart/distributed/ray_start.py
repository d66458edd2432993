"""`ray start` for a node of a rollart cluster, with the same options and output.

    export RAY_AUTH_TOKEN=…           # the same on every node: openssl rand -hex 32
    python -m rollart.distributed.ray_start --head --port=6380 --node-ip-address=10.0.0.1
    python -m rollart.distributed.ray_start --address=10.0.0.1:6380 --node-ip-address=10.0.0.2

Unlike `ray start`: every server listens on the interface of `--node-ip-address` only (`one_interface`), all of them ask
for the token, the autoscaler and log monitor are left out, and a node that is gone is noticed (`HEALTH_CHECKS`) within
12 s. The web server, which takes jobs, runs only with `--include-dashboard=true`; it needs `ray[default]`. With
`--block`, SIGTERM drains the node (`ray_drain`). `--node-ip-address=auto` is the interface that leads to `--address`.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from ray.scripts.scripts import main

from rollart.distributed import one_interface
from rollart.distributed.node_environment import EVERY_NODE
from rollart.distributed.ray_drain import set_deadline
from rollart.distributed.ray_local import tamed
from rollart.distributed.ray_process import TOKEN_VARIABLE
from rollart.types.errors import RequestError

AUTO = "auto"
DASHBOARD = "--include-dashboard=true"


def environment(address: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the node of this address adds to the environment."""
    if not inherited.get(TOKEN_VARIABLE) and not inherited.get("RAY_AUTH_TOKEN_PATH"):
        raise RequestError(
            f"no token: set {TOKEN_VARIABLE} to the same secret on every node of the cluster, for example the output "
            "of `openssl rand -hex 32`"
        )
    return EVERY_NODE | one_interface.variables(address, inherited)


def own_address(options: Sequence[str]) -> str:
    """Address of this node's interface to the cluster."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--node-ip-address", default="")
    parser.add_argument("--address", default="")
    found = parser.parse_known_args(options)[0]
    if not found.node_ip_address or (found.node_ip_address == AUTO and not found.address):
        raise RequestError("--node-ip-address is missing: give the address of this node's interface to the cluster")
    if found.node_ip_address != AUTO:
        return str(found.node_ip_address)
    host, _, port = found.address.rpartition(":")
    return one_interface.address_towards(host.strip("[]"), int(port))


def _with_address(options: Sequence[str], address: str) -> list[str]:
    auto = f"--node-ip-address={AUTO}"
    return [f"--node-ip-address={address}" if option == auto else option for option in options]


if __name__ == "__main__":
    try:
        own = own_address(sys.argv[1:])
        os.environ.update(environment(own, os.environ))
    except RequestError as error:
        sys.exit(f"rollart: {error}")
    sys.argv = ["ray", "start", *_with_address(sys.argv[1:], own)]
    set_deadline(head="--head" in sys.argv)
    with tamed(web_server=DASHBOARD in sys.argv):
        main()
