"""Settings of a pool of engines."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from rollart.config.base import Strict
from rollart.config.elasticity import AUTO_ENGINES, EngineRange
from rollart.config.injection import Slowdowns
from rollart.config.numbers import NotNegative, NotNegativeReal, Positive, PositiveReal
from rollart.config.tasks import ANY, AUTO
from rollart.types.errors import ConfigError
from rollart.types.messages import KvOnUpdate


def _kind_of_engines(value: object) -> str:
    """So that an error speaks of what was meant."""
    if isinstance(value, Mapping | EngineRange):
        return "range"
    return AUTO if isinstance(value, str) else "number"


class PoolSettings(Strict):
    """A pool of engines of one hardware class."""

    engines: Annotated[
        Annotated[NotNegative, Tag("number")]
        | Annotated[Literal["auto"], Tag("auto")]
        | Annotated[EngineRange, Tag("range")],
        Discriminator(_kind_of_engines),
    ] = 1
    """A number, `{ min = 1, max = 4 }` for a pool that grows and shrinks, or `auto`: the range that the devices allow.

    0 for a pool that only environments, rewards or the trainer use."""
    hardware: str = ""
    """Hardware class; the pool's name by default."""
    accelerator: str = ""
    """Accelerator of its nodes, such as `H800`: the label `ray.io/accelerator-type` (on a cluster)."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Further labels of its nodes (on a cluster)."""
    fallback: tuple[str, ...] = ()
    """Pools whose nodes may host its engines while its own have no room; by default they wait (on a cluster)."""
    ranks: NotNegative = 0
    """GPUs of one engine, all on one node; 0 = it runs on CPUs (on a cluster)."""
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of its GPU that one engine reserves; less than 1 to share it with the trainer or other engines, which
    reserve the rest (on a cluster). Nothing sleeps meanwhile: all of them must fit into the memory of the GPU."""
    cpus: NotNegativeReal = 1.0
    """CPUs that one engine reserves (on a cluster; on this machine alone nothing is reserved)."""
    memory_gb: NotNegativeReal = 0.0
    """Memory that one engine reserves (on a cluster)."""
    engine: Literal["torch", "vllm", "reference"] = "torch"
    """Inference engine (real runs). `reference` is slow and simple, for comparisons."""
    slots: Positive = 64
    """Maximum number of concurrent requests of an engine."""
    kv_mib: PositiveReal = 256.0
    """Memory of the torch engine's KV cache."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    """Device of the torch engine."""
    inject: Slowdowns = ()
    """Slow its engines on purpose, one table or several (torch engine, and in the simulator)."""
    prefill_tokens: Positive = 256
    """Prompt tokens per step of the torch engine: more = earlier first token, fewer = steadier decoding."""
    kv_on_update: KvOnUpdate = KvOnUpdate.RECOMPUTE
    """KV cache of requests in flight when the weights change: recompute it, or keep it."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`."""
    python: str = ""
    """Path of the Python interpreter that runs these engines, such as `.venv-vllm/bin/python` (real runs on Ray).

    Defaults to the controller's. Its Python (major.minor) and Ray versions must match the controller's.
    """

    @property
    def range(self) -> EngineRange:
        """Bounds of the number of engines; the same for a fixed number."""
        if isinstance(self.engines, EngineRange):
            return self.engines
        if self.engines == AUTO:
            return EngineRange(min=1, max=AUTO_ENGINES, start=1)
        assert isinstance(self.engines, int)
        return EngineRange.model_construct(min=self.engines, max=self.engines, start=self.engines)

    @property
    def elastic(self) -> bool:
        """Whether the number of engines may change."""
        return not isinstance(self.engines, int)


def check_pool(name: str, pool: PoolSettings) -> None:
    hardware = pool.hardware or name
    if hardware in (AUTO, ANY):
        raise ConfigError(
            f"pools.{name}", f"{hardware!r} cannot be the name of a hardware class; set pools.{name}.hardware"
        )
    if pool.gpu_share < 1 and pool.ranks != 1:
        raise ConfigError(f"pools.{name}.gpu_share", f"an engine of {pool.ranks} GPUs takes all of each; set ranks = 1")
    if pool.inject and pool.engine != "torch":
        raise ConfigError(f"pools.{name}.inject", f"the {pool.engine} engine cannot be slowed on purpose; torch can")
