"""Settings of supervised training on demonstrations: the `[sft]` table of a config. Imports without torch."""

from typing import Annotated

from pydantic import Field

from rollart.config.base import Strict

PositiveReal = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]


class SftSettings(Strict):
    """How `rollart sft` trains. Precision, device, LoRA and the token budget are those of `[trainer]`."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimiser steps; by default as many as `epochs` passes take."""
    epochs: Annotated[int, Field(ge=1)] = 2
    """Passes over the demonstrations, without `steps`."""
    batch_tokens: Annotated[int, Field(ge=1)] = 4096
    """Tokens per step: whole demonstrations until there are as many."""
    learning_rate: PositiveReal | None = None
    """By default 1e-3 for a model from scratch, 5e-4 with LoRA, else 5e-5."""
    warmup_share: Share = 0.05
    """Share of the steps in which the rate grows; then it falls along a cosine, to a twentieth."""
    observation_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight of an observation token after the first observation; answer tokens weigh 1, prompts 0."""
    held_out_share: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """Share of the demonstrations that are not trained on; their loss is reported."""
    eval_every: Annotated[int, Field(ge=1)] = 25
    """Steps between two reports of the held-out loss."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints that an interrupted training resumes from; 0 = only the last step."""
    min_reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Use only demonstrations with at least this reward (rejection sampling); required for the folder of a run."""
    episodes: Annotated[int, Field(ge=1)] = 500
    """Episodes that a player plays per task."""
