"""Settings of `rollart serve`."""

from typing import Literal

from pydantic import Field

from rollart.config.base import Strict

LOOPBACK = "127.0.0.1"


class ServeSettings(Strict):
    """The command's options; none depends on the model."""

    host: str = LOOPBACK
    port: int = Field(default=8000, ge=0, le=65535)
    """0 = any that is free."""
    slots: int = Field(default=64, ge=1)
    """Maximum number of answers that are generated at once."""
    queue: int = Field(default=256, ge=0)
    """Answers that may wait beside them; further requests get status 429."""
    max_context: int | None = Field(default=None, ge=2)
    """Tokens of prompt and answer; None = what the model was trained for, at most 8192."""
    kv_mib: float = Field(default=1024.0, gt=0, allow_inf_nan=False)
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    grace_s: int = Field(default=30, ge=1)
    """Time for requests in flight to finish after SIGTERM."""
