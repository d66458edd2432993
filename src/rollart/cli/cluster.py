"""`rollart cluster`: several Ray nodes on this machine for trials, and what runs on any cluster."""

import sys
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rollart.app.running import RuntimeKind, require
from rollart.app.tables import PlainTable
from rollart.types.errors import RequestError
from rollart.types.placement import Node

app = typer.Typer(no_args_is_help=True, help="Start a trial cluster on this machine; show what runs on a cluster.")


@app.command()
def up(
    nodes: Annotated[str, typer.Option(help="Nodes by kind: the accelerator's name, or cpu.")] = "H800=1,H20=1,cpu=1",
    num_cpus: Annotated[int, typer.Option(min=0, help="CPUs that each node declares.")] = 4,
    num_gpus: Annotated[int, typer.Option(min=0, help="GPUs that each node with an accelerator declares.")] = 1,
    jobs: Annotated[
        bool, typer.Option("--jobs", help="Take Ray Jobs (rollart deploy ray-job); needs ray[default].")
    ] = False,
) -> None:
    """Start several labelled Ray nodes on this machine. What they declare need not exist, so placement can be tried.

    Example: rollart cluster up --nodes H800=2,H20=1,cpu=1
    """
    require(RuntimeKind.RAY)
    from rollart.distributed import trial_cluster

    cluster = trial_cluster.up(trial_cluster.parse(nodes, num_cpus, num_gpus), jobs=jobs)
    sys.stderr.write(f"{len(cluster.nodes)} nodes are up; run on them with: rollart train --address auto\n")
    if cluster.jobs:
        sys.stderr.write(f"jobs are taken at {cluster.jobs}\n")


@app.command()
def down() -> None:
    """End the trial cluster of this machine, with everything that runs on it.

    Example: rollart cluster down
    """
    require(RuntimeKind.RAY)
    from rollart.distributed import trial_cluster

    sys.stderr.write("the trial cluster is down\n" if trial_cluster.down() else "there is no trial cluster\n")


@app.command()
def show(
    address: Annotated[str, typer.Option(help="HOST:PORT of the head of a Ray cluster, or auto.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print only one JSON object on stdout.")] = False,
) -> None:
    """Show the nodes of a cluster, which workers of which runs are there, and why if not where they prefer to be.

    Example: rollart cluster show
    """
    require(RuntimeKind.RAY)
    from rollart.distributed.ray_cluster import RayCluster
    from rollart.distributed.ray_placement import read_nodes, read_workers

    with RayCluster(address):
        nodes, workers = read_nodes(), read_workers()
    if json:
        found = {"nodes": nodes, "workers": [worker._asdict() for worker in workers]}
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    console, names = Console(), {node.id: node.name for node in nodes}
    console.print(_node_table(nodes))
    table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("worker", "node", "why"):
        table.add_column(column)
    for worker in workers:
        table.add_row(worker.worker, names.get(worker.node, "waits"), worker.why)
    console.print(table if workers else "no workers")


@app.command()
def wait(
    nodes: Annotated[int, typer.Argument(min=1, help="Number of nodes, the head included.")],
    address: Annotated[str, typer.Option(help="HOST:PORT of the head of a Ray cluster, or auto.")] = "auto",
    timeout_s: Annotated[float, typer.Option(min=0, help="Give up after this many seconds, with exit code 1.")] = 600.0,
) -> None:
    """Wait until a cluster that is starting has all of its nodes.

    Example: rollart cluster wait 3 --address 10.0.0.1:6380
    """
    require(RuntimeKind.RAY)
    from rollart.distributed.ray_cluster import wait_for_nodes

    names = wait_for_nodes(address, nodes, timeout_s)
    sys.stderr.write(f"{len(names)} nodes are up: {', '.join(names)}\n")


@app.command()
def drain(
    node: Annotated[str, typer.Argument(help="Beginning of the id of a node, as `rollart cluster show` prints it.")],
    address: Annotated[str, typer.Option(help="HOST:PORT of the head of a Ray cluster, or auto.")] = "auto",
    deadline_s: Annotated[float, typer.Option(min=0, help="Time that its workers have to finish.")] = 120.0,
) -> None:
    """Drain a node: nothing new is placed there, its workers finish or move, and then it leaves the cluster.

    Example: rollart cluster drain 08acb0
    """
    require(RuntimeKind.RAY)
    from rollart.distributed import ray_drain
    from rollart.distributed.ray_cluster import RayCluster
    from rollart.distributed.ray_placement import read_nodes

    with RayCluster(address) as cluster:
        found = [each for each in read_nodes() if each.id.startswith(node)]
        if len(found) != 1:
            raise RequestError(f"{len(found)} nodes have an id that begins with {node!r}; see `rollart cluster show`")
        if found[0].is_head:
            raise RequestError(f"{found[0].name} is the head of the cluster, which cannot do without it")
        ray_drain.drain(cluster.head, found[0].id, deadline_s)
    sys.stderr.write(f"{found[0].name} drains\n")


def _node_table(nodes: list[Node]) -> Table:
    table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("node", "CPUs free", "GPUs free", "labels", "state"):
        table.add_column(column)
    for node in nodes:
        labels = ", ".join(f"{key}={value}" for key, value in sorted(node.labels.items()) if key != "ray.io/node-id")
        cpus, gpus = (f"{node.free.get(each, 0):g} of {node.total.get(each, 0):g}" for each in ("CPU", "GPU"))
        table.add_row(node.name, cpus, gpus, labels, "drains" if node.draining else "ready")
    return table
