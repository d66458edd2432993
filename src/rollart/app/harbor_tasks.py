"""Tasks whose environment is a folder of Harbor tasks: their prompts are the task folders, and their limits fit."""

from pathlib import Path

from rollart.app.given_prompts import rows_or_seeds
from rollart.config.tasks import TaskSettings
from rollart.tasks.harbor.environment import COMMAND_S, Harbor, rows_of, tasks_of
from rollart.types.errors import ConfigError, RequestError

PREFIX = "harbor:"
ROOM_S = 60.0
"""Time of a grading step beyond that of the tests: for another sandbox, and for copying to it."""


def is_harbor(task: TaskSettings) -> bool:
    return task.environment.startswith(PREFIX)


def with_folders(task: TaskSettings) -> TaskSettings:
    """The task with a row for each task folder, unless it has rows of its own."""
    if not is_harbor(task) or not isinstance(task.prompts, tuple):
        return task
    return task.model_copy(update={"prompts": rows_or_seeds("prompts", rows_of(_folder(task)))})


def with_absolute_folder(task: TaskSettings) -> TaskSettings:
    """The task as workers get it, which have another working directory."""
    settings = dict(task.environment_settings)
    if isinstance(settings.get("roots"), dict):
        settings["roots"] = {image: str(Path(root).absolute()) for image, root in settings["roots"].items()}
    environment = f"{PREFIX}{Path(_folder(task)).absolute()}"
    return task.model_copy(update={"environment": environment, "environment_settings": settings})


def check_harbor(name: str, task: TaskSettings) -> None:
    """Refuse task folders that cannot be played here, and a deadline that cuts off their tests."""
    key = f"tasks.{name}"
    if task.python:
        raise ConfigError(f"{key}.python", "is not for Harbor tasks, which run in sandboxes of the worker; remove it")
    tasks_of.cache_clear()  # the files may have changed since an earlier run of this process
    try:
        tasks = Harbor(_folder(task), **task.environment_settings).tasks
    except (RequestError, TypeError) as error:
        raise ConfigError(f"{key}.environment", str(error)) from error
    slowest = max(tasks.values(), key=lambda each: each.grading_s)
    # The last command of an answer may begin just before `tool_timeout_s` has passed; then the tests run.
    commands_s = task.tool_timeout_s + float(task.environment_settings.get("command_s", COMMAND_S))
    least_s = slowest.grading_s + ROOM_S + commands_s
    if task.step_deadline_s < least_s:
        raise ConfigError(
            f"{key}.step_deadline_s",
            f"is {task.step_deadline_s:g}; commands may take {commands_s:g} s and grading {slowest.name} "
            f"{slowest.grading_s:g} s, so set it to {least_s:g} or more",
        )


def _folder(task: TaskSettings) -> str:
    return task.environment.removeprefix(PREFIX)
