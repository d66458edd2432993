"""The tables of a `task.toml` of Harbor: every key of the format, and nothing else.

Whether what a key asks for can be had here is decided in `support`; here a key is only known, and has the right type.
Keys of earlier versions are converted, as Harbor does it.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rollart.config.base import Strict
from rollart.config.numbers import NotNegative, Positive, PositiveReal

NetworkMode = Literal["no-network", "public", "allowlist"]
User = str | int


class Phase(Strict):
    """What the agent and the verifier have in common."""

    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None
    user: User | None = None


class AgentTable(Phase):
    timeout_sec: PositiveReal | None = None


class EnvironmentTable(Strict):
    build_timeout_sec: PositiveReal = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    memory_mb: Positive | None = None
    storage_mb: Positive | None = None
    gpus: NotNegative | None = None
    gpu_types: tuple[str, ...] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: tuple[dict[str, Any], ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None
    workdir: str | None = None
    network_mode: NetworkMode | None = None
    """Harbor's default is `public`; whether it was written makes no difference there."""
    allowed_hosts: tuple[str, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _earlier_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        found = dict(data)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if isinstance(found.get(old), str):
                found.setdefault(new, _megabytes(old, found.pop(old)))
        internet = found.pop("allow_internet", None)
        if internet is not None and "network_mode" not in found and found.get("allowed_hosts") is None:
            found["network_mode"] = "public" if internet else "no-network"
        return found


class CollectTable(Strict):
    """A command in the agent's environment, before artifacts are taken from there."""

    command: str
    service: str = "main"
    timeout_sec: PositiveReal = 60.0
    user: User | None = None


class VerifierTable(Phase):
    timeout_sec: PositiveReal = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: tuple[CollectTable, ...] = ()


class ArtifactTable(Strict):
    source: str
    destination: str | None = None
    """Where Harbor keeps a copy for people; no matter for grading."""
    exclude: tuple[str, ...] = ()
    service: str = "main"

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, data: Any) -> Any:
        return {"source": data} if isinstance(data, str) else data


class SolutionTable(Strict):
    env: dict[str, str] = Field(default_factory=dict)


class TaskToml(Strict):
    schema_version: str = "1.4"
    task: dict[str, Any] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    verifier: VerifierTable = VerifierTable()
    agent: AgentTable = AgentTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    source: str | None = None
    multi_step_reward_strategy: str | None = None
    steps: tuple[dict[str, Any], ...] | None = None
    artifacts: tuple[ArtifactTable, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _earlier_key(cls, data: Any) -> Any:
        if isinstance(data, dict) and "version" in data:
            others = {key: value for key, value in data.items() if key != "version"}
            return {"schema_version": data["version"]} | others
        return data


def _megabytes(key: str, text: str) -> int:
    units = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
    number, unit = text.strip()[:-1], text.strip()[-1:].upper()
    try:
        return int(float(number) * units[unit])
    except (KeyError, ValueError):
        raise ValueError(f"{key} is {text!r}; write a number and K, M or G, such as '2G'") from None
