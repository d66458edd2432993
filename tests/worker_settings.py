"""Settings of workers, written flat: tests change one of them at a time."""

from collections.abc import Mapping
from typing import Any

from rollart.config.algorithm import AlgorithmSettings, CriticSettings
from rollart.config.pools import PoolSettings
from rollart.config.tasks import TaskSettings
from rollart.config.training import TrainerSettings


def worker_settings(factory: Any, flat: Mapping[str, Any]) -> dict[str, Any]:
    """What a run would start this worker with: keys of a config table are put into that table."""
    match factory.__name__:
        case "TorchEngine" | "ReferenceEngine" | "VllmEngine":
            return _nested(flat, pool=PoolSettings)
        case "EnvironmentHost":
            return _nested(flat, settings=TaskSettings)
        case "ReferenceTrainer":
            return _nested(flat, trainer=TrainerSettings)
        case "TorchTrainer":
            return _nested(_with_critic(flat), trainer=TrainerSettings, algorithm=AlgorithmSettings)
    return dict(flat)


def _nested(flat: Mapping[str, Any], **tables: type[Any]) -> dict[str, Any]:
    settings = dict(flat)
    for name, model in tables.items():
        own = {key: settings.pop(key) for key in list(settings) if key in model.model_fields}
        settings.setdefault(name, model(**own))
    return settings


def _with_critic(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`critic`, a table of its own here, is part of the algorithm."""
    settings = dict(flat)
    critic = settings.pop("critic", None)
    if isinstance(critic, CriticSettings):
        critic = critic.model_dump(exclude_unset=True)
    return settings if critic is None else {**settings, "advantage": "gae", **critic}
