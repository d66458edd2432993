"""Settings of a task and its rewards."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rollart.config.base import Strict
from rollart.config.held_out import HELD_OUT_SHARE
from rollart.config.injection import Injections
from rollart.config.numbers import NotNegative, NotNegativeReal, Positive, PositiveReal, Seconds
from rollart.config.reward_place import RewardPlace
from rollart.config.rows import Rows
from rollart.config.tools import Mcp
from rollart.types.trajectory import StaleTreatment
from rollart.types.transcript import Truncation

AUTO = "auto"
ANY = "any"

EPISODE_RETURN = "rollart.backends.rewards.functions:episode_return"
"""The default reward: the sum of the rewards of the turns."""


class RewardSettings(RewardPlace):
    """One reward of a task: its function, its part in the sum, and where it runs (real runs)."""

    function: str = ""
    """Factory path of the function, `package.module:callable`. May be left out for a URL; then it sees one transcript.
    """
    name: str = ""
    """Name in metrics and report; that of the function by default."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """The reward of a trajectory is the weighted sum of its task's rewards; 0 only measures."""
    deadline_s: Seconds | None = None
    """Limit of one attempt; `deadlines.reward_s` by default."""
    default: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Value where the reward fails for good, counted and shown; by default the trajectory ends as `reward_failed`."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, data: Any) -> Any:
        return {"function": data} if isinstance(data, str) else data

    @property
    def label(self) -> str:
        return self.name or self.function.rpartition(":")[2].rpartition(".")[2]


class TaskSettings(Strict):
    """One task: its environments, its share of the batch, its hardware, its limits."""

    share: PositiveReal = 1.0
    """Share of the batch relative to the other tasks; must give every task a whole number of groups per batch."""
    hardware: str = AUTO
    """Preferred hardware class. `auto`: found by measurement, in modes with affinity; `any`: no preference."""
    fallback: tuple[str, ...] | None = None
    """Classes to use when the preferred one is missing or overloaded; None = every other class."""
    environments: Positive = 16
    """Maximum number of concurrent episodes."""
    environments_per_worker: Positive = 64
    environment_pool: str = ""
    """Pool whose nodes run its environments, or any other node while none of those has room; by default any node."""
    environment_cpus: NotNegativeReal = 1.0
    """CPUs that an environment worker reserves (on a cluster)."""
    max_turns: Positive = 30
    """Turns after which an episode is truncated."""
    max_turn_tokens: Positive = 64
    """Tokens sampled in one turn at most."""
    max_context: Positive = 32768
    """Maximum length of a sequence in tokens; an episode that reaches it is truncated."""
    temperature: Annotated[float, Field(ge=0.01, allow_inf_nan=False)] = 1.0
    """Sampling temperature, the same for all tasks of a run. Logits divided by a tiny one overflow, and their
    log-probabilities are NaN."""
    alpha: NotNegative | None = None
    """Staleness bound of this task; the run's `alpha` by default."""
    stale: StaleTreatment = StaleTreatment.ABORT
    """What happens to members past the bound: they end, or finish with their tokens masked."""
    stale_retries: NotNegative = 2
    """Losses to the staleness bound after which a prompt gets a bound of its own, `late_alpha`, so that slow prompts
    are trained too."""
    late_alpha: NotNegative | None = None
    """Staleness bound of such prompts; default 4 (alpha + 1). A prompt that exceeds it is given up as failed."""
    reset_deadline_s: Seconds = 600.0
    """Limit of an environment's reset; then the trajectory ends as `env_failed`."""
    step_deadline_s: Seconds = 120.0
    """The same for a step."""
    share_deadline_s: Seconds = 3600.0
    """How long a batch waits for this task, counted from when the trainer is free."""
    unfilled: Literal["redistribute", "stop"] = "redistribute"
    """Action at that deadline: other tasks fill in for this batch (recorded), or the run stops."""
    eval_episodes: NotNegative = 0
    """Held-out prompts per evaluation."""
    eval_samples: Positive = 1
    """Attempts at each of them, for pass@k and mean@k."""
    pass_reward: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Reward from which an attempt counts as passed."""
    environment: str = ""
    """Factory path of the environment, `package.module:callable` (real runs). Without one, rows of `prompts` are
    answered in a single turn, or with `tools`."""
    environment_settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    python: str = ""
    """Path of a Python interpreter that plays its environments, such as `.venv-fields/bin/python` (real runs).

    Defaults to the worker's own. It needs Python 3.10 and the environment's packages, and nothing of rollart; on a
    cluster it must exist on every node that runs environments.
    """
    inject: Injections = ()
    """Latency and failures injected into its environments, one table or several (real runs)."""
    reward: str = ""
    """Factory path of the reward function (real runs); by default the sum of the rewards of the turns."""
    rewards: tuple[RewardSettings, ...] = ()
    """Several rewards, or one with settings, in place of `reward`: functions, or tables with `function`, `weight`, …"""
    prompts: tuple[int, int] | str | Rows = (0, 100_000)
    """Training prompts: a range of seeds, `[first, past-the-last]`; or rows of data, in a JSON-lines or Parquet file or
    in a folder (of such files, or of texts). The fields of a row are the prompt's data."""
    eval_prompts: tuple[int, int] | str | Rows = (1_000_000, 1_001_000)
    """Held-out prompts, given likewise. Data without any is split by content, see `held_out_share`."""
    hold_out: Literal["content", "seed"] = "content"
    """How training and held-out seeds are kept disjoint (real runs).

    `content`: a quarter of all contents, by hash, if the task exposes them; seeds often draw the same content.
    `seed`: only the seeds differ; for tasks with too few contents to hold any out.
    """
    held_out_share: Annotated[float, Field(ge=0, lt=1)] = HELD_OUT_SHARE
    """Share of the rows that are held out, by a hash of their content; unused where `eval_prompts` are data too."""
    system: str = ""
    """System message of a task without an environment."""
    prompt: str | tuple[dict[str, str], ...] = ""
    """First message of a task without an environment, such as `"{question}"`, or several with `role` and `content`;
    fields of the row in braces. Default: the row's `prompt`, `messages`, `question`, `problem` or `text`."""
    tools: tuple[str | Mcp, ...] = ()
    """Tools of a task without an environment: factory paths of functions or classes, and tables such as
    `{ mcp = ["my-db-server"] }` or `{ mcp = "http://…" }` (real runs)."""
    tool_format: Literal["auto", "hermes", "llama", "plain"] = "auto"
    """How the model writes tool calls; `auto`: by its chat template."""
    tool_timeout_s: Seconds = 30.0
    """Limit of one tool call; the model sees that it took too long, and goes on."""
    tool_result_chars: Annotated[int, Field(ge=100)] = 8000
    """Results of tools are cut to this length."""

    @model_validator(mode="before")
    @classmethod
    def _earlier_key(cls, data: Any) -> Any:
        """Configs of earlier versions have `prompt_path` besides the range of seeds."""
        if not (isinstance(data, dict) and "prompt_path" in data):
            return data
        others = {key: value for key, value in data.items() if key != "prompt_path"}
        return others | {"prompts": data["prompt_path"]} if data["prompt_path"] else others

    @property
    def without_environment(self) -> bool:
        """Whether its rows are the whole task: the model answers them, with tools if there are any."""
        return not self.environment and not isinstance(self.prompts, tuple)

    @property
    def all_rewards(self) -> tuple[RewardSettings, ...]:
        """Its rewards: at least one."""
        return self.rewards or (RewardSettings(function=self.reward or EPISODE_RETURN),)

    def limit_reached(self, turns: int, context: int) -> Truncation | None:
        """Limit of the agent that an episode has reached, after an observation; `context` in tokens."""
        if turns >= self.max_turns:
            return Truncation.TURNS
        return Truncation.CONTEXT if context >= self.max_context else None
