"""The base of every configuration model."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Frozen, and refuses keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)
