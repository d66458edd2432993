"""Several Ray nodes on this machine, for trials and tests: a head and others, each with labels and resources of choice.

    <temporary folder>/rollart-cluster-<user>/
        cluster.json     address, token and nodes; only this user can read it
        session_…        the files of Ray

Invariants: the nodes listen on the loopback address only and ask for the token; `down` ends every process that runs on
them, however it was started; there is at most one trial cluster per user.
"""

import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from rollart.distributed import ray_reaper
from rollart.types.errors import RequestError, RunError
from rollart.types.placement import ACCELERATOR

LOOPBACK = "127.0.0.1"
FILE = "cluster.json"
KIND = "rollart/kind"
"""Label of the kind of a node: its accelerator type, or `cpu`."""
CPU = "cpu"
"""Kind of nodes without an accelerator."""
OBJECT_STORE_BYTES = 256 * 2**20
START_S = 180.0
MODULE = "rollart.distributed.ray_start"
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""0 keeps Ray from replacing a loopback address by a reachable one, where its job server would look for the head."""


class TrialNode(msgspec.Struct, frozen=True):
    kind: str
    """Accelerator type, or `cpu`."""
    cpus: int
    gpus: int


class TrialCluster(msgspec.Struct, frozen=True):
    address: str
    token: str
    nodes: tuple[TrialNode, ...]
    jobs: str = ""
    """URL of the server that takes jobs; empty if it has none."""


def folder() -> Path:
    return Path(tempfile.gettempdir()) / f"rollart-cluster-{os.getuid()}"


def read() -> TrialCluster | None:
    """The trial cluster of this user; None if there is none."""
    try:
        return msgspec.json.decode((folder() / FILE).read_bytes(), type=TrialCluster)
    except FileNotFoundError:
        return None


def parse(nodes: str, cpus: int, gpus: int) -> tuple[TrialNode, ...]:
    """Nodes from a description such as `H800=2,H20=1,cpu=1`; every node with an accelerator has `gpus` of it.

    >>> parse("H20=1,cpu=1", cpus=4, gpus=8)
    (TrialNode(kind='H20', cpus=4, gpus=8), TrialNode(kind='cpu', cpus=4, gpus=0))
    """
    found: list[TrialNode] = []
    for part in nodes.split(","):
        kind, _, number = part.strip().partition("=")
        if not kind or not (number or "1").isdigit():
            raise RequestError(f"--nodes {nodes}: {part.strip()!r} is not KIND=NUMBER; give, for example, H800=2,cpu=1")
        found += [TrialNode(kind, cpus, 0 if kind == CPU else gpus)] * int(number or 1)
    if not found:
        raise RequestError(f"--nodes {nodes}: no node; give, for example, H800=2,cpu=1")
    return tuple(found)


def up(nodes: tuple[TrialNode, ...], *, jobs: bool = False) -> TrialCluster:
    """Start a cluster; the first node is its head. With `jobs` it takes Ray Jobs, which needs `ray[default]`."""
    if jobs:
        check_jobs()
    if read() is not None:
        raise RequestError("a trial cluster is already up; see `rollart cluster show`, or end it: rollart cluster down")
    ray_reaper.reap(str(folder()))  # what is left of one that was killed while it started
    folder().mkdir(mode=0o700)
    address, token = f"{LOOPBACK}:{_free_port()}", secrets.token_hex(32)
    cluster = TrialCluster(address, token, nodes, f"http://{LOOPBACK}:{_free_port()}" if jobs else "")
    try:
        for number in range(len(nodes)):
            start_node(cluster, number)
    except BaseException:
        ray_reaper.reap(str(folder()))
        raise
    descriptor = os.open(folder() / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(cluster))
    return cluster


def start_node(cluster: TrialCluster, number: int) -> None:
    """Start node `number` of the cluster: at its start, or again after it was killed."""
    node = cluster.nodes[number]
    port = cluster.address.rpartition(":")[2]
    where = ["--head", f"--port={port}", f"--temp-dir={folder()}"] if number == 0 else [f"--address={cluster.address}"]
    if number == 0 and cluster.jobs:
        dashboard = cluster.jobs.rpartition(":")[2]
        where += ["--include-dashboard=true", f"--dashboard-host={LOOPBACK}", f"--dashboard-port={dashboard}"]
    labels = [f"--labels={KIND}={node.kind}" + (f",{ACCELERATOR}={node.kind}" if node.kind != CPU else "")]
    command = [sys.executable, "-m", MODULE, *where, *labels]
    command += [f"--num-cpus={node.cpus}", f"--num-gpus={node.gpus}", f"--node-ip-address={LOOPBACK}"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats"]
    variables = {TOKEN_VARIABLE: cluster.token, ray_reaper.MARK: str(folder())}
    if number == 0 and cluster.jobs:
        variables[LOOPBACK_ONLY] = "0"
    try:
        done = subprocess.run(
            command,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"node {number} ({node.kind}) of the trial cluster did not start within {START_S:g} s") from None
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"]
        raise RunError(f"node {number} ({node.kind}) of the trial cluster did not start: {reason[-1]}")


def check_jobs() -> None:
    """Refuse where Ray's server of jobs is not installed."""
    missing = [name for name in ("aiohttp", "aiohttp_cors", "opencensus") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(
            f"Ray Jobs need ray[default], which is not installed ({', '.join(missing)} missing); install it with: "
            "pip install 'rollart[jobs]'"
        )


def down() -> bool:
    """End the cluster and everything that runs on it; False if there is none."""
    there = folder().exists()
    ray_reaper.reap(str(folder()))
    return there


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
