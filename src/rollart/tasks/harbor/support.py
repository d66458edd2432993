"""What a `task.toml` may ask for and cannot have here. Every such key is refused by name before the run starts.

Invariant: a key either has the effect that it has in Harbor, or is refused, or is listed in docs/harbor.md as one
without effect (`cpus`, `destination`, metadata).
"""

import re
from collections.abc import Iterator
from pathlib import Path

from rollart.tasks.harbor.schema import EnvironmentTable, Phase, TaskToml

_TEMPLATE = re.compile(r"\$\{[^}]*\}")
MAIN = "main"
OFFLINE = "sandboxes have no network; set environment_settings.offline = true to play such tasks without"


def refusals(config: TaskToml, folder: Path, *, offline: bool) -> Iterator[str]:
    """Why a task cannot be played, one sentence for each reason."""
    if not config.schema_version.startswith("1."):
        yield f"schema_version is {config.schema_version!r}; versions 1.x are supported"
    if config.steps:
        yield "[[steps]]: tasks of several steps are not supported"
    if config.multi_step_reward_strategy:
        yield "multi_step_reward_strategy: tasks of several steps are not supported"
    yield from _environment("environment", config.environment, offline=offline)
    for name, phase in (("agent", config.agent), ("verifier", config.verifier)):
        yield from _phase(name, phase, offline=offline)
    yield from _templates("verifier.env", config.verifier.env)
    yield from _templates("solution.env", config.solution.env)
    yield from _verifier(config, offline=offline)
    for artifact in config.artifacts:
        if artifact.service != MAIN:
            yield f"artifacts: {artifact.source!r} is of the service {artifact.service!r}; there is only {MAIN!r}"
        if artifact.exclude:
            yield f"artifacts: `exclude` of {artifact.source!r} is not supported"
        path = artifact.source
        if not path.startswith("/") or ".." in path.split("/") or not path.strip("/"):
            yield f"artifacts: {path!r} is not the absolute path of a file or folder"
    yield from _files(folder)


def _verifier(config: TaskToml, *, offline: bool) -> Iterator[str]:
    verifier = config.verifier
    if verifier.environment is not None:
        if verifier.environment_mode == "shared":
            yield "verifier.environment contradicts environment_mode = 'shared'"
        yield from _environment("verifier.environment", verifier.environment, offline=offline)
    for hook in verifier.collect:
        if hook.service != MAIN:
            yield f"verifier.collect: there is no service {hook.service!r}, only {MAIN!r}"
        if hook.user is not None:
            yield "verifier.collect: `user` is not supported; a sandbox has one user, that of the agent"


def _environment(name: str, table: EnvironmentTable, *, offline: bool) -> Iterator[str]:
    if table.os.lower() != "linux":
        yield f"{name}.os is {table.os!r}; sandboxes are Linux"
    if table.gpus:
        yield f"{name}.gpus: sandboxes have no GPU"
    if table.gpu_types:
        yield f"{name}.gpu_types: sandboxes have no GPU"
    for key in ("tpu", "mcp_servers", "skills_dir", "healthcheck"):
        if getattr(table, key):
            yield f"{name}.{key} is not supported"
    if table.workdir is not None and not table.workdir.startswith("/"):
        yield f"{name}.workdir is {table.workdir!r}, which is not an absolute path"
    yield from _templates(f"{name}.env", table.env)
    if not offline and table.network_mode != "no-network":
        mode = f"is {table.network_mode!r}" if table.network_mode else "is missing, which means 'public'"
        yield f"{name}.network_mode {mode}: {OFFLINE}"
    elif not offline and table.allowed_hosts:
        yield f"{name}.allowed_hosts: {OFFLINE}"


def _phase(name: str, phase: Phase, *, offline: bool) -> Iterator[str]:
    if not offline and phase.network_mode not in (None, "no-network"):
        yield f"{name}.network_mode is {phase.network_mode!r}: {OFFLINE}"
    elif not offline and phase.allowed_hosts:
        yield f"{name}.allowed_hosts: {OFFLINE}"


def _templates(name: str, env: dict[str, str]) -> Iterator[str]:
    for key, value in env.items():
        if _TEMPLATE.search(value):
            yield f"{name}.{key} takes {value!r} from the machine's environment, which sandboxes do not see"


def _files(folder: Path) -> Iterator[str]:
    for name, about in (
        ("environment/docker-compose.yaml", "only single containers, by a Dockerfile, are supported"),
        ("tests/docker-compose.yaml", "only single containers, by a Dockerfile, are supported"),
        ("environment/.dockerignore", "it is not supported; remove what it excludes"),
        ("tests/.dockerignore", "it is not supported; remove what it excludes"),
        ("trajectory.json", "a conversation to continue is not supported"),
        ("steps", "tasks of several steps are not supported"),
    ):
        if (folder / name).exists():
            yield f"{name}: {about}"
    for ignored in sorted(folder.rglob(".harborignore")):
        yield f"{ignored.relative_to(folder)}: it is not supported; remove what it excludes"
