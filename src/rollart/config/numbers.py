"""Numbers of a config, with their ranges."""

from typing import Annotated

from pydantic import Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveReal = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegativeReal = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = PositiveReal
"""Always finite: every wait has a deadline."""
