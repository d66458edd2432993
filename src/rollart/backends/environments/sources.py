"""Where the environments of a worker come from: a factory in this process, an interpreter of its own, or rows."""

from typing import Protocol

from rollart.backends.environments.chat import ChatEnvironment, ChatTask
from rollart.backends.environments.codec import Codec
from rollart.backends.environments.gym import as_text_environment
from rollart.backends.environments.interpreter import Interpreter, Work
from rollart.backends.environments.shipping import LIBRARIES
from rollart.backends.environments.tool_environment import ToolCalling
from rollart.config.tasks import TaskSettings
from rollart.ports.environment import AnyTextEnvironment, Shared, SharingFactory, ToolEnvironment
from rollart.ports.factory import load


class EnvironmentSource(Protocol):
    """Makes environments, one for every episode, in any thread."""

    def build(self) -> AnyTextEnvironment: ...

    def close(self) -> None:
        """Free what the environments share. All of them are closed, or hang."""
        ...


class InProcess:
    """Environments of this process."""

    def __init__(self, settings: TaskSettings, codec: Codec) -> None:
        self._factory = load(settings.environment)
        self._settings = settings
        self._codec = codec
        factory: object = self._factory
        self._shared: Shared | None = None
        if isinstance(factory, SharingFactory):
            self._shared = factory.open_shared(**settings.environment_settings)

    def build(self) -> AnyTextEnvironment:
        built = self._factory(**self._settings.environment_settings)
        if isinstance(built, ToolEnvironment):
            calling: AnyTextEnvironment = ToolCalling(built, self._settings, self._codec)
            return calling
        environment: AnyTextEnvironment = as_text_environment(built)
        return environment

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()


class Chats:
    """Rows of data that are answered, without an environment."""

    def __init__(self, settings: TaskSettings, codec: Codec) -> None:
        self._task = ChatTask(settings, codec)

    def build(self) -> AnyTextEnvironment:
        environment: AnyTextEnvironment = ChatEnvironment(self._task)
        return environment

    def close(self) -> None:
        self._task.close()


def open_source(task: str, settings: TaskSettings, slots: int, codec: Codec) -> EnvironmentSource:
    """The source of a task's environments, for a worker with that many slots."""
    if not settings.environment:
        return Chats(settings, codec)
    if not settings.python:
        return InProcess(settings, codec)
    return own_interpreter(task, settings, slots)


def own_interpreter(task: str, settings: TaskSettings, slots: int) -> Interpreter:
    """The interpreter that a task names, playing its environments."""
    check = settings.environment.startswith(f"{LIBRARIES}.")  # their names are those of the library, which is there
    work = Work(settings.environment, settings.environment_settings, check)
    return Interpreter(settings.python, work, title=f"rollart: environment {task}", slots=slots)
