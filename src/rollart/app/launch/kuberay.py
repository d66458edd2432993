"""A run as a KubeRay RayJob: `kubectl apply -f` starts its cluster, trains, and removes the cluster.

    Secret                 the token that every Ray process asks for
    ConfigMap              environment of every Ray process
    ConfigMap              config, the files that it names, and start.sh  ──► /etc/rollart of the head
    PersistentVolumeClaim  run folders  ──► /runs of the head; nothing else is kept
    RayJob
      head                 controller and run folder; reserves nothing
      worker groups        one per pool (`groups`), with its labels, GPUs, CPUs and memory

A job that fails is retried with a new cluster (`backoffLimit`) and resumes the run in /runs. A pod that is deleted or
evicted drains first: its preStop hook returns when workers have left it.
"""

import secrets
import shlex
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import msgspec

from rollart.app.launch.files import keys_of
from rollart.app.launch.groups import NodeGroup, dns_name
from rollart.config.schema import RunConfig
from rollart.distributed.node_environment import DRAIN_VARIABLE, EVERY_NODE
from rollart.types.errors import RequestError
from rollart.types.placement import ACCELERATOR

FILES = "/etc/rollart"
RUNS = "/runs"
START = "start.sh"
TOKEN_KEY = "auth_token"
"""Under which KubeRay looks for the token in a Secret."""
GPU = "nvidia.com/gpu"
GPU_PRODUCT = "nvidia.com/gpu.product"
"""Label that NVIDIA's GPU feature discovery gives to machines."""
HEAD_CPUS, HEAD_MEMORY = 4, "16Gi"
MEMORY_SHARE = 1.25
MEMORY_BESIDE_BYTES = 4 * 2**30
"""Ray, its object store and shared weights, beside what workers reserve."""
STOP_S = 60
"""Time to end after a drain."""
KEPT_S = 600
"""How long a finished cluster stays, for its logs."""


class KubeSettings(msgspec.Struct, frozen=True):
    """What a config does not say."""

    image: str
    name: str
    selectors: Mapping[str, Mapping[str, str]] = {}
    """By pool: node selector instead of the one for its accelerator."""
    code: str = ""
    """Folder of the image with the user's code; by default it comes from the ConfigMap."""
    secret: str = ""
    """Existing Secret with the token; by default the manifest has one."""
    claim: str = ""
    """Existing claim for /runs; by default the manifest has one."""
    storage: str = "100Gi"
    retries: int = 3


def manifest(
    config: RunConfig,
    config_name: str,
    files: Mapping[str, str],
    groups: Sequence[NodeGroup],
    settings: KubeSettings,
    token: str | None = None,
) -> list[dict[str, Any]]:
    """The objects. `files` are texts by name, the config among them; `token` is drawn unless given."""
    for pool in settings.selectors:
        if pool not in config.pools:
            raise RequestError(f"--node-selector {pool}: there is no such pool; pools are {', '.join(config.pools)}")
    objects: list[dict[str, Any]] = []
    if not settings.secret:
        data = {TOKEN_KEY: secrets.token_hex(32) if token is None else token}
        objects.append(_object("v1", "Secret", _secret(settings), type="Opaque", stringData=data))
    if not settings.claim:
        asked = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": settings.storage}}}
        objects.append(_object("v1", "PersistentVolumeClaim", _claim(settings), spec=asked))
    variables = EVERY_NODE | {DRAIN_VARIABLE: str(_drain_s(config))}
    objects.append(_object("v1", "ConfigMap", f"{settings.name}-environment", data=variables))
    keys = keys_of(list(files))
    texts = {keys[name]: text for name, text in files.items()} | {START: start_script(config_name, settings)}
    objects.append(_object("v1", "ConfigMap", f"{settings.name}-files", data=texts))
    return [*objects, _ray_job(config, keys, groups, settings)]


def start_script(config_name: str, settings: KubeSettings) -> str:
    """What the job runs on the head. The files of a ConfigMap are links to a folder that changes: they are copied."""
    if settings.code:
        where, config = f"cd {shlex.quote(settings.code)}", f"{FILES}/{config_name}"
    else:
        where, config = f'mkdir -p "$HOME/code"\ncp -rL {FILES}/* "$HOME/code"\ncd "$HOME/code"', config_name
    run = f"{RUNS}/{settings.name}"
    train = f"exec rollart train {shlex.quote(config)} --out {run} --continue --address auto"
    return f"#!/bin/bash\nset -eu\n{where}\n{train}\n"


def _ray_job(
    config: RunConfig, keys: Mapping[str, str], groups: Sequence[NodeGroup], settings: KubeSettings
) -> dict[str, Any]:
    head_volumes = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": _claim(settings)}},
        {"name": "files", "configMap": {"name": f"{settings.name}-files", "items": _items(keys)}},
    ]
    head_mounts = [{"name": "runs", "mountPath": RUNS}, {"name": "files", "mountPath": FILES, "readOnly": True}]
    size = {"cpu": str(HEAD_CPUS), "memory": HEAD_MEMORY}
    head = _container("ray-head", settings, size) | {"volumeMounts": head_mounts}
    ports = {"gcs-server": 6379, "dashboard": 8265}
    head["ports"] = [{"containerPort": port, "name": name} for name, port in ports.items()]
    cluster = {
        "rayVersion": metadata.version("ray"),
        "authOptions": {"mode": "token", "secretName": _secret(settings)},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
            "template": {"spec": {"containers": [head], "volumes": head_volumes}},
        },
        "workerGroupSpecs": [_worker_group(group, settings, _drain_s(config)) for group in groups],
    }
    spec = {
        "entrypoint": f"bash {FILES}/{START}",
        "backoffLimit": settings.retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": KEPT_S,
        "rayClusterSpec": cluster,
    }
    return _object("ray.io/v1", "RayJob", settings.name, spec=spec)


def _worker_group(group: NodeGroup, settings: KubeSettings, drain_s: int) -> dict[str, Any]:
    size = {"cpu": str(group.cpus)} | ({GPU: str(group.gpus)} if group.gpus else {})
    if group.memory_bytes:
        size["memory"] = str(round(group.memory_bytes * MEMORY_SHARE) + MEMORY_BESIDE_BYTES)
    container = _container("ray-worker", settings, size)
    hook = {"exec": {"command": ["python", "-m", "rollart.distributed.ray_drain"]}}
    container["lifecycle"] = {"preStop": hook}
    pod: dict[str, Any] = {"containers": [container], "terminationGracePeriodSeconds": drain_s + STOP_S}
    selector = settings.selectors.get(group.name, _accelerator_selector(group))
    if selector:
        pod["nodeSelector"] = dict(selector)
    if group.gpus:
        pod["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    return {
        "groupName": dns_name(group.name),
        "replicas": group.nodes,
        "minReplicas": group.nodes,
        "maxReplicas": group.nodes,
        **({"labels": group.labels} if group.labels else {}),
        "rayStartParams": {"num-cpus": str(group.cpus), "num-gpus": str(group.gpus)},
        "template": {"spec": pod},
    }


def _accelerator_selector(group: NodeGroup) -> dict[str, str]:
    accelerator = group.labels.get(ACCELERATOR, "")
    return {GPU_PRODUCT: f"NVIDIA-{accelerator}"} if accelerator and group.gpus else {}


def _container(name: str, settings: KubeSettings, size: Mapping[str, str]) -> dict[str, Any]:
    token = {"valueFrom": {"secretKeyRef": {"name": _secret(settings), "key": TOKEN_KEY}}}
    return {
        "name": name,
        "image": settings.image,
        "envFrom": [{"configMapRef": {"name": f"{settings.name}-environment"}}],
        # KubeRay adds it as well; without it an old operator would start a cluster without a token.
        "env": [{"name": "RAY_AUTH_TOKEN", **token}],
        "resources": {"requests": dict(size), "limits": dict(size)},
    }


def _items(keys: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "path": name} for name, key in keys.items()] + [{"key": START, "path": START}]


def _object(version: str, kind: str, name: str, **parts: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **parts}


def _drain_s(config: RunConfig) -> int:
    return round(config.deadlines.drain_s)


def _secret(settings: KubeSettings) -> str:
    return settings.secret or f"{settings.name}-token"


def _claim(settings: KubeSettings) -> str:
    return settings.claim or f"{settings.name}-runs"
