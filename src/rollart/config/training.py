"""Settings of the trainer: optimiser, precision, ranks. Imports without torch."""

import math
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rollart.config.base import Strict

KEEP_CHECKPOINTS = 2
"""Default number of checkpoints to keep."""
PositiveReal = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _zero_if_automatic(value: object) -> object:
    return 0 if value == "auto" else value


class Schedule(Strict):
    """Learning-rate schedule, a function of the number of steps made so far; it has no other state to save.

    Skipped steps do not count.
    """

    kind: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    """Linear warm-up: the step after this many has the full learning rate."""
    total_steps: int | None = Field(default=None, ge=1)
    """`cosine`: number of steps, warm-up included, after which the rate has fallen to `final_share` and stays there."""
    final_share: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kind == "cosine" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError("a cosine schedule needs total_steps greater than warmup_steps")
        if self.kind == "constant" and (self.total_steps is not None or self.final_share):
            raise ValueError("total_steps and final_share apply only to the schedule `cosine`")
        return self

    def share(self, steps: int) -> float:
        """Share of the full learning rate for the step that follows `steps` steps.

        >>> [Schedule(warmup_steps=2).share(steps) for steps in range(4)]
        [0.3333333333333333, 0.6666666666666666, 1.0, 1.0]
        >>> [round(Schedule(kind="cosine", total_steps=4).share(steps), 3) for steps in range(6)]
        [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
        """
        if steps < self.warmup_steps:
            return (steps + 1) / (self.warmup_steps + 1)
        if self.total_steps is None:
            return 1.0
        gone = min(1.0, (steps - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.final_share + (1.0 - self.final_share) * (1.0 + math.cos(math.pi * gone)) / 2


class LoraSettings(Strict):
    """LoRA: train low-rank factors of the linear layers instead of the model."""

    rank: int = Field(default=16, ge=1)
    alpha: PositiveReal = 32.0
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get factors, by the suffix of their names; `all-linear` = all but the output head."""
    publish: Literal["adapter", "merged"] = "adapter"
    """What is published to engines: the factors, or full weights with the factors merged in."""


class TrainerSettings(Strict):
    """The `[trainer]` table of a config."""

    learning_rate: PositiveReal = 1e-3
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_grad_norm: PositiveReal = 1.0
    schedule: Schedule = Schedule()
    token_budget: int = Field(default=2048, ge=1)
    """Tokens per forward and backward pass; affects memory, not the result."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the layers' computation and of published weights."""
    device: str = "cpu"
    gradient_checkpointing: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    max_skipped: int = Field(default=3, ge=1)
    """Consecutive claims without a finite step after which the run stops."""
    ranks: Annotated[int, BeforeValidator(_zero_if_automatic), Field(ge=0)] = 1
    """Number of FSDP2 ranks; on `cuda` each has its own GPU. `auto` (or 0): as many as the first split of devices gives
    training."""
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of its GPU that each rank reserves; less than 1 to share it with engines, which reserve the rest (on a
    cluster)."""
    pool: str = ""
    """Pool whose nodes run the trainer, or any other node while none of those has room; by default any node."""
    cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """CPUs that one rank reserves (on a cluster; on this machine alone nothing is reserved)."""
    lora: LoraSettings | None = None
