"""Whether every node of a cluster can take part in a run: what it should be, what it is, and what to do about it.

    probe (`distributed.cluster_probe`) ──► answers ──► `judge`, pure ──► findings of every node

A finding is `bad` if a run would fail or go wrong because of it, and a `note` otherwise; both have a remedy.
"""

from collections.abc import Mapping, Sequence
from importlib import metadata
from platform import python_version
from typing import Any, NamedTuple

import msgspec

from rollart.app.compose import interpreter_of, labels_of
from rollart.config.schema import RunConfig
from rollart.types.placement import Node

LEAST_MEMORY_BYTES = 2 * 10**9
LEAST_DISK_BYTES = 10**9
LEAST_SHARED_BYTES = 250 * 10**6
MAX_CLOCK_OFFSET_S = 2.0
"""Deadlines of draining nodes and the times in logs are wall-clock times."""

Interpreters = dict[str, tuple[str, ...]]
"""By path of an interpreter: modules that it must have."""


class Finding(msgspec.Struct, frozen=True):
    mark: str
    """`bad` or `note`."""
    what: str


class NodeHealth(msgspec.Struct, frozen=True):
    node: Node
    answer: dict[str, Any]
    """What the node says of itself (`distributed.node_probe`), or a `problem`."""
    findings: tuple[Finding, ...]


class Versions(NamedTuple):
    """Those of the controller."""

    python: str
    packages: dict[str, str]


def own_versions() -> Versions:
    return Versions(python_version(), {name: _version(name) for name in ("rollart", "ray", "torch")})


def examine_cluster(address: str, config: RunConfig | None) -> list[NodeHealth]:
    """Health of every node. With a config, the interpreters of its pools are checked where they would run."""
    from rollart.distributed.cluster_probe import probe_nodes  # here: other commands need no Ray
    from rollart.distributed.ray_cluster import RayCluster
    from rollart.distributed.ray_placement import read_nodes

    with RayCluster(address) as cluster:
        nodes = read_nodes()
        wanted = {node.id: {} if config is None else interpreters_on(config, node) for node in nodes}
        answers = probe_nodes(nodes, wanted)
        trial = cluster.is_trial
    ours = own_versions()
    return [
        NodeHealth(node, answers[node.id], tuple(judge(node, answers[node.id], ours, trial=trial))) for node in nodes
    ]


def interpreters_on(config: RunConfig, node: Node) -> Interpreters:
    """Interpreters of the pools whose engines may run on this node."""
    found: Interpreters = {}
    for pool in config.pools.values():
        kinds = [labels_of(pool), *(labels_of(config.pools[other]) for other in pool.fallback)]
        here = any(all(node.labels.get(key) == value for key, value in labels.items()) for labels in kinds)
        if pool.range.max and pool.python and here:
            needed = ("vllm",) if pool.engine == "vllm" else ()
            found[interpreter_of(pool)] = found.get(interpreter_of(pool), ()) or needed
    return found


def judge(node: Node, answer: Mapping[str, Any], ours: Versions, *, trial: bool = False) -> list[Finding]:
    """What is wrong with a node; on a trial cluster GPUs are only declared.

    >>> judge(Node("a", "", {}, {}, {}), {"problem": "it is gone"}, own_versions())
    [Finding(mark='bad', what='it is gone; restart its Ray node')]
    """
    if "problem" in answer:
        return [Finding("bad", f"{answer['problem']}; restart its Ray node")]
    return [
        *_wrong_versions(answer["python"], answer["packages"], ours, "it"),
        *_wrong_gpus(node, answer["gpus"], trial=trial),
        *_too_little(answer),
        *_wrong_link(answer["link"]),
        *(
            finding
            for path, found in answer["interpreters"].items()
            for finding in _wrong_interpreter(path, found, ours)
        ),
    ]


def _wrong_versions(python: str, packages: Mapping[str, str], ours: Versions, who: str) -> list[Finding]:
    found = []
    if _minor(python) != _minor(ours.python):
        found.append(
            Finding("bad", f"{who} has Python {python} and the controller {ours.python}; install {_minor(ours.python)}")
        )
    for name in ("ray", "rollart"):
        there, here = packages[name], ours.packages[name]
        if there != here:
            has = f"has {name} {there}" if there else f"has no {name}"
            found.append(
                Finding("bad", f"{who} {has} and the controller has {here}; install it: pip install {name}=={here}")
            )
    torch, own = (found.partition("+")[0] for found in (packages["torch"], ours.packages["torch"]))
    if not torch:
        found.append(
            Finding(
                "note", f"{who} has no torch: only environments and rewards can run there; pip install rollart[train]"
            )
        )
    elif own and torch != own:
        what = f"{who} has torch {torch} and the controller {own}; install it: pip install torch=={own}"
        found.append(Finding("bad", what))
    return found


def _wrong_gpus(node: Node, visible: int, *, trial: bool) -> list[Finding]:
    declared = node.total.get("GPU", 0.0)
    if visible < declared:
        what = f"it declares {declared:g} GPUs and has {visible}; "
        if trial:
            return [Finding("note", what + "a trial cluster need not have them")]
        return [
            Finding("bad", what + "check its driver and device permissions, or start its Ray with the right --num-gpus")
        ]
    if visible > declared:
        return [Finding("note", f"it has {visible} GPUs and declares {declared:g}; the others stay unused")]
    return []


def _too_little(answer: Mapping[str, Any]) -> list[Finding]:
    checks = (
        ("memory", "memory_bytes", LEAST_MEMORY_BYTES, "end other programs there"),
        ("disk in its folder of temporary files", "disk_bytes", LEAST_DISK_BYTES, "free space, or set TMPDIR"),
        ("shared memory", "shared_bytes", LEAST_SHARED_BYTES, "weights are shared through it: mount a larger /dev/shm"),
    )
    return [
        Finding("bad", f"it has {answer[key] / 1e9:.2f} GB of {what} free, {least / 1e9:g} GB are needed; {remedy}")
        for what, key, least, remedy in checks
        if answer[key] is not None and answer[key] < least
    ]


def _wrong_link(link: Mapping[str, Any]) -> list[Finding]:
    if "problem" in link:
        return [
            Finding(
                "bad",
                f"it cannot connect to the controller ({link['problem']}); allow TCP between the nodes, on all ports",
            )
        ]
    if abs(link["offset_s"]) > MAX_CLOCK_OFFSET_S:
        return [
            Finding(
                "bad",
                f"its clock differs from the controller's by {link['offset_s']:+.1f} s; run chrony or ntpd on both",
            )
        ]
    return []


def _wrong_interpreter(path: str, found: Mapping[str, Any], ours: Versions) -> list[Finding]:
    if "problem" in found:
        return [Finding("bad", f"{path}: {found['problem']}; install it there, at this path")]
    # Its torch may be another one: it serves another engine.
    packages = {**found["packages"], "torch": ours.packages["torch"] or "any"}
    missing = [
        Finding("bad", f"{path} has no {name}; install it: {path} -m pip install {name}") for name in found["missing"]
    ]
    return [*_wrong_versions(found["python"], packages, ours, path), *missing]


def problems(healths: Sequence[NodeHealth], mark: str) -> list[str]:
    """Sentences with the name of their node."""
    return [
        f"{health.node.name}: {finding.what}"
        for health in healths
        for finding in health.findings
        if finding.mark == mark
    ]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
