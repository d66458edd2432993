"""Where the environments of a worker come from: a factory in this process, or an interpreter of its own."""

from typing import Protocol

from rollart.backends.environments.gym import as_text_environment
from rollart.backends.environments.interpreter import Interpreter, Work
from rollart.backends.environments.shipping import LIBRARIES
from rollart.config.schema import TaskSettings
from rollart.ports.environment import AnyTextEnvironment
from rollart.ports.factory import load


class EnvironmentSource(Protocol):
    """Makes environments, one for every episode, in any thread."""

    def build(self) -> AnyTextEnvironment: ...

    def close(self) -> None:
        """Free what the environments share. All of them are closed, or hang."""
        ...


class InProcess:
    """Environments of this process."""

    def __init__(self, settings: TaskSettings) -> None:
        self._factory = load(settings.environment)
        self._settings = settings.environment_settings

    def build(self) -> AnyTextEnvironment:
        environment: AnyTextEnvironment = as_text_environment(self._factory(**self._settings))
        return environment

    def close(self) -> None:
        """Nothing is shared."""


def open_source(task: str, settings: TaskSettings, slots: int) -> EnvironmentSource:
    """The source of a task's environments, for a worker with that many slots."""
    if not settings.python:
        return InProcess(settings)
    check = settings.environment.startswith(f"{LIBRARIES}.")  # their names are those of the library, which is there
    work = Work(settings.environment, settings.environment_settings, check)
    return Interpreter(settings.python, work, title=f"rollart: environment {task}", slots=slots)
