"""A run on a Ray cluster: its connection, and whether the cluster has what the run asks for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rollart.app.checkpoints import CHECKPOINTS
from rollart.app.compose import first_workers
from rollart.config.schema import RunConfig
from rollart.control.fleet import WorkerSpec
from rollart.policy.placement import Planned, emptied, impossible, plan
from rollart.types.errors import RequestError
from rollart.types.placement import Needs, Node

if TYPE_CHECKING:
    from rollart.distributed.ray_cluster import RayCluster
    from rollart.distributed.ray_files import ControllerFiles


@contextmanager
def connected(address: str | None) -> "Iterator[RayCluster | None]":
    """Connection to the cluster at this address, with the code of this process on its way; None without an address."""
    if address is None:
        yield None
        return
    from rollart.distributed.code_travel import code_of_this_process  # here: simulations need no Ray
    from rollart.distributed.ray_cluster import RayCluster

    with RayCluster(address, code_of_this_process()) as cluster:
        yield cluster


def served_files(config: RunConfig, folder: Path, logs: Path) -> "ControllerFiles":
    """What other nodes need of this machine: checkpoints and logs of the run folder, and a model given as a folder."""
    from rollart.distributed.ray_files import ControllerFiles

    folders = [Path(config.model)] if isinstance(config.model, str) else []
    return ControllerFiles(folder, checkpoints=folder / CHECKPOINTS, logs=logs, folders=folders)


def cluster_nodes() -> list[Node]:
    """Nodes of the cluster that this process is connected to."""
    from rollart.distributed.ray_placement import read_nodes

    return read_nodes()


def placement(config: RunConfig) -> list[Planned]:
    """Where the workers of a run would be placed now."""
    return plan(_asked(first_workers(config)), cluster_nodes())


def check_placement(config: RunConfig, *, resumed: bool) -> list[str]:
    """Refuse a run with workers that the cluster can never place; what is only occupied is waited for.

    Of an elastic pool only the minimum has to fit.

    A resumed run may have lost nodes: it starts with what is left, as long as every role has a worker that fits.
    Returns what the others wait for.
    """
    specs = first_workers(config, least=True)
    nodes = cluster_nodes()
    alone = impossible(_asked(specs), nodes)
    together = [each for each in plan(_asked(specs), emptied(nodes)) if each.node is None]
    if not alone and not together:
        return []
    reasons = alone or [f"{each.name}: {each.why}, beside the other workers of the run" for each in together]
    if resumed and _every_role_fits(specs, nodes):
        return reasons
    raise RequestError("the cluster cannot take this run: " + "; ".join(reasons))


def _every_role_fits(specs: Sequence[WorkerSpec], nodes: Sequence[Node]) -> bool:
    planned = plan(_asked(specs), emptied(nodes))
    owners = [spec for spec in specs for _ in range(spec.ranks)]
    waiting = {spec.name for spec, each in zip(owners, planned, strict=True) if each.node is None}
    return {spec.role for spec in specs if spec.name not in waiting} == {spec.role for spec in specs}


def _asked(specs: Sequence[WorkerSpec]) -> list[tuple[str, Needs]]:
    return [
        (f"{spec.name} rank {rank}" if rank else spec.name, spec.needs) for spec in specs for rank in range(spec.ranks)
    ]
