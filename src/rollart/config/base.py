"""Base class of all configuration models."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Frozen model that rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)
