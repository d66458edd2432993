"""What a task is made of, checked before a run: its kind, its prompts, and what the model is shown of them."""

from rollart.app.harbor_tasks import check_harbor, is_harbor, with_folders
from rollart.backends.environments.chat import ChatTask
from rollart.backends.environments.codec import Codec
from rollart.backends.environments.prompt_text import PromptText
from rollart.config.rows import Rows
from rollart.config.schema import RunConfig
from rollart.config.suggest import did_you_mean
from rollart.config.tasks import EPISODE_RETURN
from rollart.ports.prompts import PromptSource
from rollart.tasks.prompt_files import Table, TablePrompts, content_of, read_table
from rollart.tasks.prompts import NoPrompts, SeedPrompts
from rollart.types.errors import ConfigError, EnvironmentFault, RequestError

OF_CHATS = ("system", "prompt", "tools")
"""Settings of tasks without an environment."""


def check_kind(config: RunConfig, name: str) -> None:
    """A task has an environment, or rows with a reward."""
    task = config.tasks[name]
    if is_harbor(task):
        check_harbor(name, task)
    if task.environment:
        for key in OF_CHATS:
            if getattr(task, key):
                raise ConfigError(
                    f"tasks.{name}.{key}", "is for tasks without an environment; this one writes its own observations"
                )
        return
    if not task.without_environment:
        # A misspelt name becomes an empty table of its own.
        others = did_you_mean(f"tasks.{name}", [f"tasks.{other}" for other in config.tasks if other != name])
        raise ConfigError(
            f"tasks.{name}.environment",
            f'is missing{others}; name a factory such as "rollart.tasks.frozenlake:FrozenLake", or give rows of data '
            "as `prompts`",
        )
    if task.python:
        raise ConfigError(
            f"tasks.{name}.python", "is the interpreter of environments, and this task has none; remove it"
        )
    if all(reward.function == EPISODE_RETURN for reward in task.all_rewards):
        raise ConfigError(
            f"tasks.{name}.reward", "is missing: without an environment nothing else says how good an answer is"
        )


def check_prompts(config: RunConfig, name: str, codec: Codec | None) -> None:
    """Read the prompts, and render those of a task without an environment.

    Without a codec (the model is made at the start of the run) only fields are checked.
    """
    task = config.tasks[name]
    prompts_of(config, name, held_out=False)
    held_out = prompts_of(config, name, held_out=True)
    if task.eval_episodes and isinstance(held_out, NoPrompts):
        raise ConfigError(f"tasks.{name}.held_out_share", f"{held_out.reason}; lower eval_episodes to 0, or raise it")
    tables = {key: _table(name, key, getattr(task, key)) for key in ("prompts", "eval_prompts")}
    _check_disjoint(name, tables)
    if not task.without_environment:
        return
    try:
        PromptText(task)
    except RequestError as error:
        raise ConfigError(f"tasks.{name}.prompt", str(error)) from error
    try:
        chat = ChatTask(task, codec)
    except RequestError as error:
        raise ConfigError(f"tasks.{name}.tools", str(error)) from error
    try:
        for key, table in tables.items():
            for id, row in table.rows.items() if table else ():
                try:
                    chat.messages(row)
                except RequestError as error:
                    raise ConfigError(f"tasks.{name}.{key}", f"row {id!r}: {error}") from error
        table = tables["prompts"]
        if codec is not None and table is not None:
            try:
                chat.try_out(next(iter(table.rows.values())))
            except (RequestError, EnvironmentFault) as error:
                raise ConfigError(f"tasks.{name}", str(error)) from error
    finally:
        chat.close()


def prompts_of(config: RunConfig, name: str, *, held_out: bool) -> PromptSource:
    """Training or held-out prompts: disjoint by seed, and by content if the task supports it."""
    task = with_folders(config.tasks[name])
    shuffle_seed = 0 if held_out else config.seed
    given = task.eval_prompts if held_out and not isinstance(task.eval_prompts, tuple) else task.prompts
    if isinstance(given, tuple):
        first, past = task.eval_prompts if held_out and isinstance(task.eval_prompts, tuple) else given
        seed_side = held_out if task.hold_out == "content" else None
        return SeedPrompts(name, first, past - first, shuffle_seed=shuffle_seed, held_out=seed_side)
    key = "eval_prompts" if given is task.eval_prompts else "prompts"
    table = _table(name, key, given)
    assert table is not None
    split = isinstance(task.eval_prompts, tuple)  # data of its own is held out as a whole
    try:
        return TablePrompts(
            name,
            table,
            shuffle_seed=shuffle_seed,
            held_out=held_out if split else None,
            share=task.held_out_share,
        )
    except RequestError as error:
        if held_out:
            return NoPrompts(str(error))
        raise ConfigError(f"tasks.{name}.{key}", str(error)) from error


def _table(name: str, key: str, given: tuple[int, int] | str | Rows) -> Table | None:
    """None for seeds."""
    if isinstance(given, tuple):
        return None
    try:
        return read_table(given)
    except RequestError as error:
        raise ConfigError(f"tasks.{name}.{key}", str(error)) from error


def _check_disjoint(name: str, tables: dict[str, Table | None]) -> None:
    """Refuse held-out rows that are trained on."""
    train, held_out = tables["prompts"], tables["eval_prompts"]
    if train is None or held_out is None:
        return
    seen = {content_of(row) for row in train.rows.values()}
    both = sum(content_of(row) in seen for row in held_out.rows.values())
    if both:
        raise ConfigError(
            f"tasks.{name}.eval_prompts", f"{both} of {len(held_out.rows)} rows are also in prompts; remove them there"
        )
