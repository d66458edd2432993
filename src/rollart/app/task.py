"""`rollart.Task`: the settings of a task, with classes, functions and rows in place of paths.

The constructor below is written from `TaskSettings` by `tools/task_signature.py`, so both have the same settings.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Never

from rollart.app.given_prompts import rows_or_seeds
from rollart.app.naming import factory_path, tool_path
from rollart.config.base import Strict
from rollart.config.load import check
from rollart.config.rows import Rows
from rollart.config.tasks import TaskSettings
from rollart.config.tools import Mcp, McpServer
from rollart.ports.reward import RewardFunction
from rollart.types.trajectory import StaleTreatment

PromptData = Iterable[Mapping[str, Any]] | str | PathLike[str] | range | tuple[int, int] | Rows
Tool = Callable[..., Any] | str | Mcp | Mapping[str, Any]
Tools = Tool | Sequence[Tool]
UNSET: Any = object()
"""Default of every setting: only what is given overrides a config."""


def mcp(
    server: Sequence[str] | str,
    *,
    env: Mapping[str, str] | None = None,
    tools: Sequence[str] = (),
    per_episode: bool = False,
    starts_s: float = 120.0,
) -> Mcp:
    """The tools of an MCP server, for `rollart.Task(tools=…)`.

    Args:
        server: A command as a list of words, which each worker starts (stdio), or the URL of a running server
            (streamable HTTP).
        env: Further environment variables of the command.
        tools: Names of the tools to offer; by default all.
        per_episode: Give every episode a connection of its own, for servers that keep state.
        starts_s: Limit of connecting and listing the tools.
    """
    place = {"url": server} if isinstance(server, str) else {"command": tuple(server)}
    settings = {**place, "env": dict(env or {}), "tools": tuple(tools), "per_episode": per_episode}
    return Mcp(mcp=check(McpServer, {**settings, "starts_s": starts_s}))


class Task(TaskSettings):
    """One task of a run. Workers import classes and functions by name, so these are at the top level of a file.

    >>> task = Task(prompts=[{"question": "1+1?", "answer": "2"}], reward="my_rewards.py:correct", max_turn_tokens=16)
    >>> task.prompts, task.max_turn_tokens
    (<1 rows>, 16)
    """

    # --- written by tools/task_signature.py
    def __init__(
        self,
        environment: Callable[..., Any] | str | None = UNSET,
        reward: RewardFunction | str | None = UNSET,
        *,
        share: float = UNSET,
        hardware: str = UNSET,
        fallback: Sequence[str] | None = UNSET,
        environments: int = UNSET,
        environments_per_worker: int = UNSET,
        environment_pool: str = UNSET,
        environment_cpus: float = UNSET,
        max_turns: int = UNSET,
        max_turn_tokens: int = UNSET,
        max_context: int = UNSET,
        temperature: float = UNSET,
        alpha: int | None = UNSET,
        stale: StaleTreatment | Literal["abort", "mask"] = UNSET,
        stale_retries: int = UNSET,
        late_alpha: int | None = UNSET,
        reset_deadline_s: float = UNSET,
        step_deadline_s: float = UNSET,
        share_deadline_s: float = UNSET,
        unfilled: Literal["redistribute", "stop"] = UNSET,
        eval_episodes: int = UNSET,
        eval_samples: int = UNSET,
        pass_reward: float = UNSET,
        environment_settings: Mapping[str, Any] = UNSET,
        python: str = UNSET,
        inject: Mapping[str, Any] | Sequence[Mapping[str, Any]] = UNSET,
        rewards: Sequence[RewardFunction | Mapping[str, Any] | str] = UNSET,
        prompts: PromptData = UNSET,
        eval_prompts: PromptData = UNSET,
        hold_out: Literal["content", "seed"] = UNSET,
        held_out_share: float = UNSET,
        system: str = UNSET,
        prompt: str | Sequence[Mapping[str, str]] = UNSET,
        tools: Tools = UNSET,
        tool_format: Literal["auto", "hermes", "llama", "plain"] = UNSET,
        tool_timeout_s: float = UNSET,
        tool_result_chars: int = UNSET,
        **unknown: Never,
    ) -> None:
        """Check the settings of a task.

        Args:
            environment: Class with Gymnasium's interface on text, or a `rollart.TextEnvironment`; a factory of one;
                or its path. Without one, the rows of `prompts` are answered in a single turn, or with `tools`.
            reward: Function of a `rollart.Transcript`, or of a list of them for a whole group; by default the sum
                of the environment's rewards.
            share: Share of the batch relative to the other tasks; must give every task a whole number of groups per
                batch.
            hardware: Preferred hardware class. `auto`: found by measurement, in modes with affinity; `any`: no
                preference.
            fallback: Classes to use when the preferred one is missing or overloaded; None = every other class.
            environments: Maximum number of concurrent episodes.
            environments_per_worker: Environments per worker.
            environment_pool: Pool whose nodes run its environments, or any other node while none of those has room;
                by default any node.
            environment_cpus: CPUs that an environment worker reserves (on a cluster).
            max_turns: Turns after which an episode is truncated.
            max_turn_tokens: Tokens sampled in one turn at most.
            max_context: Maximum length of a sequence in tokens; an episode that reaches it is truncated.
            temperature: Sampling temperature, the same for all tasks of a run. Logits divided by a tiny one
                overflow, and their log-probabilities are NaN.
            alpha: Staleness bound of this task; the run's `alpha` by default.
            stale: What happens to members past the bound: they end, or finish with their tokens masked.
            stale_retries: Losses to the staleness bound after which a prompt gets a bound of its own, `late_alpha`,
                so that slow prompts are trained too.
            late_alpha: Staleness bound of such prompts; default 4 (alpha + 1). A prompt that exceeds it is given up
                as failed.
            reset_deadline_s: Limit of an environment's reset; then the trajectory ends as `env_failed`.
            step_deadline_s: The same for a step.
            share_deadline_s: How long a batch waits for this task, counted from when the trainer is free.
            unfilled: Action at that deadline: other tasks fill in for this batch (recorded), or the run stops.
            eval_episodes: Held-out prompts per evaluation.
            eval_samples: Attempts at each of them, for pass@k and mean@k.
            pass_reward: Reward from which an attempt counts as passed.
            environment_settings: Keyword arguments of the environment.
            python: Path of a Python interpreter that plays its environments, such as `.venv-fields/bin/python`
                (real runs). Defaults to the worker's own. It needs Python 3.10 and the environment's packages, and
                nothing of rollart; on a cluster it must exist on every node that runs environments.
            inject: Latency and failures injected into its environments, one table or several (real runs).
            rewards: Several rewards: functions, or tables such as `{"function": judged, "weight": 0.2}`.
            prompts: Training prompts: rows (dicts, a Hugging Face dataset, any iterable, which is read once), the
                path of a JSON-lines or Parquet file or of a folder, or a range of seeds.
            eval_prompts: Held-out prompts, given likewise. Data without any is split by content, see
                `held_out_share`.
            hold_out: How training and held-out seeds are kept disjoint (real runs). `content`: a quarter of all
                contents, by hash, if the task exposes them; seeds often draw the same content. `seed`: only the
                seeds differ; for tasks with too few contents to hold any out.
            held_out_share: Share of the rows that are held out, by a hash of their content; unused where
                `eval_prompts` are data too.
            system: System message of a task without an environment.
            prompt: First message of a task without an environment, such as `"{question}"`, or several with `role`
                and `content`; fields of the row in braces. Default: the row's `prompt`, `messages`, `question`,
                `problem` or `text`.
            tools: Python functions, classes whose methods are tools with state per episode, and `rollart.mcp(…)`.
            tool_format: How the model writes tool calls; `auto`: by its chat template.
            tool_timeout_s: Limit of one tool call; the model sees that it took too long, and goes on.
            tool_result_chars: Results of tools are cut to this length.
        """
        given = locals()
        self._take({name: given[name] for name in TaskSettings.model_fields} | unknown)

    # --- end

    def _take(self, given: Mapping[str, Any]) -> None:
        named = {name: _named(name, value) for name, value in given.items() if value is not UNSET and value is not None}
        check(TaskSettings, named)
        super().__init__(**named)


def _named(name: str, value: Any) -> Any:
    match name:
        case "environment" | "reward":
            return factory_path(value)
        case "rewards":
            return plain(value)
        case "prompts" | "eval_prompts":
            return rows_or_seeds(name, value)
        case "tools":
            several = isinstance(value, Sequence) and not isinstance(value, str)
            return tuple([_tool(each) for each in (value if several else [value])])
    return value


def _tool(tool: Tool) -> Any:
    return plain(tool) if isinstance(tool, Strict | Mapping | str) else tool_path(tool)


def plain(value: Any) -> Any:
    """Convert a value to what TOML would give."""
    if isinstance(value, Strict):
        return {key: plain(entry) for key, entry in value.model_dump(exclude_unset=True).items()}
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return factory_path(value) if callable(value) else value
