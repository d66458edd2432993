"""rollart: reinforcement learning of LLM agents on disaggregated hardware.

`import rollart` is light: the names of the API are resolved when they are used, and torch is imported by workers alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollart.app.api import HeldOut, Result, run, sft, tiny_model
    from rollart.app.sft import SftResult
    from rollart.app.step_callback import Stop
    from rollart.app.task import Task, mcp
    from rollart.config.schema import RunConfig
    from rollart.observe.steps import StepRecord
    from rollart.ports.environment import TextEnvironment, TextStep
    from rollart.types.credit import Group, Member
    from rollart.types.errors import ConfigError, EnvironmentFault, RequestError, RollartError, RunError
    from rollart.types.trajectory import Prompt
    from rollart.types.transcript import Transcript

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "EnvironmentFault",
    "Group",
    "HeldOut",
    "Member",
    "Prompt",
    "RequestError",
    "Result",
    "RollartError",
    "RunConfig",
    "RunError",
    "SftResult",
    "StepRecord",
    "Stop",
    "Task",
    "TextEnvironment",
    "TextStep",
    "Transcript",
    "mcp",
    "run",
    "sft",
    "tiny_model",
]

_HOMES = {
    "app.api": ("HeldOut", "Result", "run", "sft", "tiny_model"),
    "app.sft": ("SftResult",),
    "app.step_callback": ("Stop",),
    "app.task": ("Task", "mcp"),
    "config.schema": ("RunConfig",),
    "observe.steps": ("StepRecord",),
    "ports.environment": ("TextEnvironment", "TextStep"),
    "types.credit": ("Group", "Member"),
    "types.errors": ("ConfigError", "EnvironmentFault", "RequestError", "RollartError", "RunError"),
    "types.trajectory": ("Prompt",),
    "types.transcript": ("Transcript",),
}
"""Where each name lives."""


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"rollart.{home}"), name)
    raise AttributeError(f"module 'rollart' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
