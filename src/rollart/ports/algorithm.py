"""The functions that a config's `[algorithm]` names, built in or a user's own: loaded alike, by factory path."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rollart.config.algorithm import AlgorithmSettings, LossSettings
from rollart.config.suggest import did_you_mean
from rollart.ports.advantage import Estimator
from rollart.ports.factory import load
from rollart.types.errors import ConfigError, RequestError


def advantage_of(settings: AlgorithmSettings) -> Estimator:
    """The advantage function; raises `ConfigError` if it cannot be loaded or does not take its settings."""
    path, options = settings.advantage_factory()
    function = _loaded("algorithm.advantage", path, "the batch")
    _check_settings("algorithm.advantage_settings", path, function, 1, options)
    return Estimator(settings.advantage_name, function, options)


def surrogate_of(settings: LossSettings) -> Callable[..., Any]:
    """The loss function, bound to its settings; see `algo.loss`. Loading it loads torch."""
    path = settings.factory()
    function = _loaded("algorithm.loss.kind", path, "the batch and the bounds of the ratio")
    _check_settings("algorithm.loss.settings", path, function, 2, settings.settings)
    return function


def _loaded(key: str, path: str, arguments: str) -> Callable[..., Any]:
    try:
        function = load(path)
    except RequestError as error:
        raise ConfigError(key, str(error)) from error
    if inspect.isclass(function):
        raise ConfigError(key, f"{path} is a class; name a function that takes {arguments}")
    return function


def _check_settings(key: str, path: str, function: Callable[..., Any], given: int, options: Mapping[str, Any]) -> None:
    """Whether the function takes `given` positional arguments and these keywords."""
    signature = inspect.signature(function)
    known = [
        name
        for name, parameter in list(signature.parameters.items())[given:]
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for name in options:
        if name not in known and not any_name:
            raise ConfigError(
                f"{key}.{name}", f"{path} takes {signature}, without such a keyword{did_you_mean(name, known)}"
            )
    try:
        signature.bind(*[None] * given, **options)
    except TypeError as error:
        raise ConfigError(key, f"{path} takes {signature}, and is called with {given} argument(s): {error}") from error
