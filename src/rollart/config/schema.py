"""The configuration of a run. Invalid configurations are rejected here, before anything starts."""

import math
import re
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rollart.config.algorithm import AlgorithmSettings
from rollart.config.base import Strict
from rollart.config.elasticity import ElasticitySettings, EngineRange
from rollart.config.modes import MODES, Mode, ModeSettings
from rollart.config.numbers import NotNegative, Positive, Seconds
from rollart.config.pools import PoolSettings, check_pool
from rollart.config.sft import SftSettings
from rollart.config.suggest import did_you_mean
from rollart.config.tasks import ANY, AUTO, TaskSettings
from rollart.config.training import KEEP_CHECKPOINTS, TrainerSettings
from rollart.types.errors import ConfigError


class BatchSettings(Strict):
    """Composition of a training batch: groups of trajectories of one prompt, which are compared with each other."""

    trajectories: Positive = 64
    """Trajectories promised per batch. A group may be trained with fewer members, or more; see `min_group_size`."""
    group_size: Positive = 8
    min_group_size: Positive | None = None
    """Members with which a group is trained if it would otherwise exceed the staleness bound; default half of
    `group_size`, at least 2. `group_size` itself means all or nothing."""
    extra_members: NotNegative | Literal["auto"] | None = None
    """Members started beyond `group_size`; those that finish before the batch is claimed are trained too.

    `auto`: as many as pay for themselves, by the measured share of members that fail or straggle, per task. Default
    `auto` in mode rollart, 0 in the others."""
    max_extra_members: NotNegative | None = None
    """Limit of `auto`; default a quarter of `group_size`, at least 1."""
    replace_late: bool = True
    """Replace members that run so long that they are expected to miss the staleness bound, in time for new ones."""
    extra_groups: NotNegative = 0
    """Groups in flight beyond what a batch needs, per task. The first to finish are kept, a bias towards short ones."""

    @property
    def minimum(self) -> int:
        return (
            min(self.group_size, max(2, -(-self.group_size // 2)))
            if self.min_group_size is None
            else (self.min_group_size)
        )

    @property
    def extra_limit(self) -> int:
        return max(1, self.group_size // 4) if self.max_extra_members is None else self.max_extra_members


class AffinitySettings(Strict):
    """How tasks with `hardware = "auto"` find their class."""

    explore: Annotated[float, Field(ge=0, le=0.5)] = 0.03
    """Maximum share of a task's trajectories that are sent to a class only to measure it, after the first few."""
    min_gain: Annotated[float, Field(gt=0, lt=1)] = 0.08
    """A task moves if that lowers the predicted load by this share, ..."""
    confirm_s: Seconds = 20.0
    """... for this long, and a training step, without interruption. A class without engines is left after this time."""
    hold_s: Seconds = 60.0
    """A task that moved for a gain stays for at least this long; twice as long after each further move, up to 32
    times."""

    @property
    def tick_s(self) -> float:
        """Seconds between two looks at the figures."""
        return min(5.0, self.confirm_s / 4)


class Deadlines(Strict):
    """How long the controller waits for its workers before it acts."""

    engine_silent_s: Seconds = 25.0
    """An engine with requests in flight that is silent for this long is considered dead and replaced."""
    turn_s: Seconds = 3600.0
    """Limit of one turn over all engines that attempt it; then the trajectory ends as `engine_failed`."""
    worker_starts_s: Seconds = 300.0
    """An environment or reward worker that has not joined within this time is replaced."""
    model_loads_s: Seconds = 1800.0
    """The same for engines and the trainer, which load a model before they join."""
    no_engine_s: Seconds = 1800.0
    """The run stops if it has had no engine for this long. A restarted engine loads its model (`model_loads_s`)."""
    stage_s: Seconds = 600.0
    update_s: Seconds = 120.0
    train_s: Seconds = 3600.0
    publish_s: Seconds = 600.0
    save_s: Seconds = 1800.0
    reward_s: Seconds = 120.0
    """Limit of one reward attempt, from the moment a reward worker has a free slot for it."""
    on_step_s: Seconds = 600.0
    """Limit of the callback of a step (`on_step`)."""
    drain_s: Seconds = 120.0
    """Time that a worker whose node drains has to finish its work; then it is stopped."""
    node_s: Seconds = 600.0
    """On a cluster: the run stops if no worker of a role has had a node for this long."""
    stall_report_s: Seconds = 300.0
    """After this long without progress of any trajectory, step or sync, the run reports what it waits for."""


class RunConfig(Strict):
    """Configuration of a run."""

    name: str = "run"
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    steps: Positive = 10
    mode: Mode = Mode.ROLLART
    alpha: NotNegative = 1
    """Staleness bound: how many updates a trajectory may lag behind the version in service when it is claimed."""
    batch: BatchSettings = BatchSettings()
    tasks: dict[str, TaskSettings]
    pools: dict[str, PoolSettings]
    eval_every: NotNegative = 0
    """Steps between evaluations; 0 = never."""
    checkpoint_every: NotNegative = 0
    """Steps between checkpoints; 0 = only after the last step, so losing the trainer means starting over.

    The last step is always saved.
    """
    keep_checkpoints: Positive = KEEP_CHECKPOINTS
    """Number of checkpoints kept; the oldest is removed after another one was saved."""
    checkpoint_url: str = ""
    """Where checkpoints are kept, by default in the run folder: a folder that all machines of the run share, or a URL
    that fsspec can open, such as `s3://bucket/run-1`. Every run needs its own."""
    journal_mb: Annotated[int, Field(ge=16)] = 1024
    """Size in MB at which the journal of a real run prunes events older than the last checkpoint; audit and report
    still cover them. Nothing is pruned before the first checkpoint."""
    transcripts_mb: NotNegative = 256
    """Size in MB of the transcripts that the run folder keeps, the newest ones; 0 = none (real runs)."""
    redact: tuple[str, ...] = ()
    """Regular expressions; what they match is left out of the texts that the run folder keeps (real runs)."""
    rolling_update: bool = False
    """Engines load a new version one by one instead of all together."""
    on_step: str = ""
    """Factory path of a function that is called with the figures of every step and may end the run (real runs)."""
    reward_workers: Positive = 1
    reward_pool: str = ""
    """Pool whose nodes run the reward workers; by default any node."""
    affinity: AffinitySettings = AffinitySettings()
    elasticity: ElasticitySettings = ElasticitySettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    trainer: TrainerSettings = TrainerSettings()
    sft: SftSettings = SftSettings()
    """Supervised training before this run, by `rollart sft`."""
    deadlines: Deadlines = Deadlines()
    model: str | dict[str, Any] = Field(default_factory=dict)
    """A checkpoint folder, or `config` for a model from scratch (real runs).

    Or `cold_start`: the small model of the built-in tasks, trained on transcripts at the start of the run. In its
    table, `tasks` has the number of transcripts by built-in task, the quickstart's three by default; `config` changes
    the architecture, and further keys the training (`ColdStartSettings`).
    """
    codec: str = ""
    """Factory path of the codec between text and the model's tokens (real runs).

    Defaults to the tokenizer and chat template of the model's folder, or to bytes if it has none.
    """

    @property
    def mode_settings(self) -> ModeSettings:
        return MODES[self.mode]

    def elastic_pools(self) -> dict[str, EngineRange]:
        """Pools whose number of engines may change."""
        return {name: pool.range for name, pool in self.pools.items() if pool.elastic}

    @property
    def groups(self) -> int:
        """Groups per batch."""
        return self.batch.trajectories // self.batch.group_size

    def groups_per_batch(self) -> dict[str, int]:
        """Groups of each task per batch; they add up to `groups`."""
        shares = self._shares()
        total = sum(shares.values())
        return {name: int(share / total * self.groups) for name, share in shares.items()}

    def alpha_of(self, task: str) -> int:
        """Staleness bound of a task."""
        own = self.tasks[task].alpha
        return self.alpha if own is None else own

    def late_alpha_of(self, task: str) -> int:
        """Staleness bound of a task's prompts that were lost too often."""
        own = self.tasks[task].late_alpha
        return 4 * (self.alpha_of(task) + 1) if own is None else own

    @property
    def automatic_extra(self) -> bool:
        """Whether the number of extra members is measured."""
        extra = self.batch.extra_members
        return extra == "auto" or (extra is None and self.mode is Mode.ROLLART)

    @property
    def max_extra(self) -> int:
        """Maximum number of extra members of a group."""
        if self.automatic_extra:
            return self.batch.extra_limit
        return self.batch.extra_members if isinstance(self.batch.extra_members, int) else 0

    def hardware_classes(self) -> dict[str, None]:
        """Hardware classes of all pools, in order."""
        return {pool.hardware or name: None for name, pool in self.pools.items() if pool.range.max}

    def fallback_of(self, task: str) -> tuple[str, ...]:
        """Classes that may serve a task besides the preferred one, in order."""
        settings = self.tasks[task]
        classes = self.hardware_classes()
        wanted = tuple(classes) if settings.fallback is None else settings.fallback
        return tuple(name for name in wanted if name in classes and name != settings.hardware)

    def declared_class(self, task: str) -> str | None:
        """Hardware class that the task declares; None if it finds one itself or has no preference."""
        hardware = self.tasks[task].hardware
        return None if hardware in (AUTO, ANY) else hardware

    def automatic_tasks(self) -> dict[str, tuple[str, ...]]:
        """Tasks that find their class by measurement, and the classes that they can use, of which there are several."""
        if not self.mode_settings.affinity:
            return {}
        usable = {name: self.fallback_of(name) for name, task in self.tasks.items() if task.hardware == AUTO}
        return {name: classes for name, classes in usable.items() if len(classes) > 1}

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self._check_present()
        self._check_batch()
        self._check_algorithm()
        for name in self.tasks:
            self._check_task(name)
        for name, pool in self.pools.items():
            check_pool(name, pool)
        for index, pattern in enumerate(self.redact):
            _check_pattern(f"redact.{index}", pattern)
        return self

    def _check_present(self) -> None:
        if not self.tasks:
            raise ConfigError("tasks", "no task is configured; add a table such as [tasks.frozenlake]")
        if not any(pool.range.max for pool in self.pools.values()):
            raise ConfigError("pools", "no pool of engines is configured; add a table such as [pools.local]")
        if not any(pool.range.min for pool in self.pools.values()):
            raise ConfigError("pools", "every pool may shrink to no engine; one needs engines.min = 1 at least")
        named = [(f"tasks.{name}.environment_pool", task.environment_pool) for name, task in self.tasks.items()]
        named += [(f"pools.{name}.fallback", other) for name, pool in self.pools.items() for other in pool.fallback]
        for key, pool in (*named, ("reward_pool", self.reward_pool), ("trainer.pool", self.trainer.pool)):
            if pool and pool not in self.pools:
                raise ConfigError(
                    key,
                    f"there is no pool {pool!r}{did_you_mean(pool, self.pools)}; pools are {', '.join(self.pools)}",
                )

    def _check_batch(self) -> None:
        batch = self.batch
        if batch.group_size > batch.trajectories:
            raise ConfigError(
                "batch.group_size",
                f"a group of {batch.group_size} is larger than the batch of {batch.trajectories} trajectories; "
                f"set batch.trajectories to a multiple of {batch.group_size}",
            )
        if batch.trajectories % batch.group_size:
            low = batch.trajectories // batch.group_size * batch.group_size
            raise ConfigError(
                "batch.trajectories",
                f"{batch.trajectories} trajectories do not divide into groups of {batch.group_size}; "
                f"use {low} or {low + batch.group_size}",
            )
        if not min(2, batch.group_size) <= batch.minimum <= batch.group_size:
            raise ConfigError(
                "batch.min_group_size",
                f"{batch.minimum} is not between 2 and batch.group_size ({batch.group_size}): a group needs others to "
                "be compared with, and is promised no more than its size",
            )
        if batch.max_extra_members is not None and not self.automatic_extra:
            raise ConfigError(
                "batch.max_extra_members", 'the number of extra members is fixed; set batch.extra_members = "auto"'
            )
        shares = self._shares()
        for name, share in shares.items():
            if not share:
                raise ConfigError(
                    f"tasks.{name}.share",
                    f"{self.tasks[name].share:g} is too small: the resolution of shares is 1/10,000; remove the task "
                    "or raise all shares",
                )
        total = sum(shares.values())
        for name, share in shares.items():
            groups = share / total * self.groups
            if groups.denominator != 1:
                raise ConfigError(
                    f"tasks.{name}.share",
                    f"a share of {float(share / total):.4g} of {self.groups} groups is {float(groups):.4g}, not "
                    f"a whole number; use a batch of {self._smallest_batch(shares)} trajectories or a multiple of it",
                )

    def _check_algorithm(self) -> None:
        algorithm, batch = self.algorithm, self.batch
        for name, kinds in algorithm.unused_parameters().items():
            raise ConfigError(
                f"algorithm.{name}",
                f"is not used by the advantage {algorithm.advantage_name!r}; remove it, or set "
                f"algorithm.advantage to {' or '.join(map(repr, kinds))}",
            )
        if algorithm.filter_zero_variance and batch.group_size == 1:
            raise ConfigError(
                "algorithm.filter_zero_variance",
                "a group of one has no variance, so every group would be filtered; raise batch.group_size",
            )
        if algorithm.filter_limit is not None and not algorithm.filter_zero_variance:
            raise ConfigError(
                "algorithm.filter_limit", "nothing is filtered; set algorithm.filter_zero_variance = true"
            )
        if algorithm.minibatches > batch.trajectories:
            raise ConfigError(
                "algorithm.minibatches",
                f"a batch of {batch.trajectories} trajectories cannot be split into {algorithm.minibatches}; "
                "lower it or raise batch.trajectories",
            )

    def _shares(self) -> dict[str, Fraction]:
        """Shares as written in the config: 0.1 is a tenth, not the nearest binary fraction."""
        return {name: Fraction(task.share).limit_denominator(10_000) for name, task in self.tasks.items()}

    def _smallest_batch(self, shares: dict[str, Fraction]) -> int:
        total = sum(shares.values())
        groups = 1
        for share in shares.values():
            part = (share / total).denominator
            groups = math.lcm(groups, part)
        return groups * self.batch.group_size

    def _check_task(self, name: str) -> None:
        task = self.tasks[name]
        classes = self.hardware_classes()
        for index, wanted in enumerate(task.fallback or ()):
            if wanted not in classes:
                raise ConfigError(f"tasks.{name}.fallback.{index}", _no_class(wanted, classes))
        declared = self.declared_class(name)
        if declared is not None and declared not in classes and not task.fallback:
            raise ConfigError(f"tasks.{name}.hardware", _no_class(declared, classes))
        if task.max_turn_tokens >= task.max_context:
            raise ConfigError(
                f"tasks.{name}.max_turn_tokens",
                f"one turn of {task.max_turn_tokens} tokens leaves no room in a context of {task.max_context}; "
                "lower it or raise max_context",
            )
        if task.tools and task.tool_timeout_s >= task.step_deadline_s:
            raise ConfigError(
                f"tasks.{name}.tool_timeout_s",
                f"is {task.tool_timeout_s:g}, and a step is given up after {task.step_deadline_s:g} s; lower it, or "
                "raise step_deadline_s",
            )
        self._check_rewards(name)
        if self.late_alpha_of(name) < self.alpha_of(name):
            raise ConfigError(
                f"tasks.{name}.late_alpha",
                f"{task.late_alpha} is below the bound of {self.alpha_of(name)} that all its prompts have; raise it",
            )
        for key, given in (("prompts", task.prompts), ("eval_prompts", task.eval_prompts)):
            if isinstance(given, tuple) and not 0 <= given[0] < given[1]:
                raise ConfigError(
                    f"tasks.{name}.{key}",
                    f"[{given[0]}, {given[1]}] is not a range of seeds; give [first, past-the-last], with first >= 0",
                )
        if not (isinstance(task.prompts, tuple) and isinstance(task.eval_prompts, tuple)):
            return
        overlap = range(max(task.prompts[0], task.eval_prompts[0]), min(task.prompts[1], task.eval_prompts[1]))
        if len(overlap):
            raise ConfigError(
                f"tasks.{name}.eval_prompts",
                f"seeds {overlap.start} to {overlap.stop - 1} are also used for training; the ranges must be disjoint",
            )

    def _check_rewards(self, name: str) -> None:
        task = self.tasks[name]
        if task.reward and task.rewards:
            raise ConfigError(f"tasks.{name}.reward", "is given besides rewards; move it into the list")
        seen: dict[str, int] = {}
        for index, reward in enumerate(task.rewards):
            key = f"tasks.{name}.rewards.{index}"
            problem = reward.problem()
            if problem:
                raise ConfigError(f"{key}.{problem[0]}", problem[1])
            if not reward.label:
                if reward.remote:
                    raise ConfigError(f"{key}.name", "is missing; without a function, a URL needs a name for its curve")
                raise ConfigError(f"{key}.function", 'is missing; name a function such as "my_rewards.py:correct"')
            if reward.fallback and not reward.function:
                raise ConfigError(f"{key}.fallback", "needs the function itself; name it as `function`")
            if "/" in reward.label:
                raise ConfigError(f"{key}.name", f"{reward.label!r} has a slash, which separates task and reward")
            if reward.label in seen:
                raise ConfigError(
                    f"{key}.name", f"{reward.label!r} is also that of reward {seen[reward.label]}; give each its own"
                )
            seen[reward.label] = index
        if task.rewards and all(reward.default is not None for reward in task.rewards):
            raise ConfigError(
                f"tasks.{name}.rewards.0.default",
                "every reward has a default, so that a trajectory could be trained with no reward computed at all; "
                "at least one must do without",
            )


def _check_pattern(key: str, pattern: str) -> None:
    try:
        matches_nothing = re.compile(pattern).match("")
    except re.error as error:
        raise ConfigError(key, f"{pattern!r} is not a regular expression: {error}") from error
    if matches_nothing:
        raise ConfigError(key, f"{pattern!r} matches the empty text, and so everywhere; make it match something")


def _no_class(wanted: str, classes: dict[str, None]) -> str:
    return (
        f"no pool offers the hardware class {wanted!r}{did_you_mean(wanted, classes)}; pools offer {', '.join(classes)}"
    )
