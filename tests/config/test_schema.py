"""What a run may be configured with, and what is refused before anything starts."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollart.config
from rollart.config.algorithm import AdvantageKind
from rollart.config.injection import slowdown_at
from rollart.config.load import check, load_toml
from rollart.config.modes import MODES, Mode
from rollart.config.schema import RunConfig
from rollart.config.tasks import EPISODE_RETURN
from rollart.types.errors import ConfigError
from rollart.types.transcript import Truncation

PRESETS = Path(rollart.config.__file__).parent / "presets"


def config(
    *,
    batch: dict[str, int] | None = None,
    tasks: dict[str, dict[str, Any]] | None = None,
    pools: dict[str, dict[str, Any]] | None = None,
    **rest: Any,
) -> RunConfig:
    return check(
        RunConfig,
        {
            "batch": batch or {},
            "tasks": {"maze": {}} if tasks is None else tasks,
            "pools": {"local": {}} if pools is None else pools,
            **rest,
        },
    )


def refused(**changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    return caught.value


# --- the algorithm --------------------------------------------------------------------------------------------------

PARAMETERS = {
    "group_baseline": (True, ["reinforce_plus_plus"]),
    "step_weight": (0.5, ["gigpo"]),
    "normalise": (False, ["gigpo"]),
    "discount": (0.5, ["gigpo", "gae"]),
    "trace": (0.5, ["gae"]),
    "value_weight": (0.5, ["gae"]),
    "value_learning_rate": (0.5, ["gae"]),
    "whiten": (False, ["gae"]),
}


@pytest.mark.parametrize("kind", AdvantageKind)
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_that_the_advantage_has_no_use_for_is_refused(kind: AdvantageKind, name: str) -> None:
    value, users = PARAMETERS[name]
    algorithm = {"advantage": kind.value, name: value}
    if kind.value in users:
        assert getattr(config(algorithm=algorithm).algorithm, name) == value
        return
    error = refused(algorithm=algorithm)
    assert error.path == f"algorithm.{name}"
    assert error.problem == (
        f"is not used by the advantage {kind.value!r}; remove it, or set algorithm.advantage to "
        f"{' or '.join(map(repr, users))}"
    )


@pytest.mark.parametrize("kind", AdvantageKind)
def test_a_config_that_was_written_down_is_the_same_when_read(kind: AdvantageKind) -> None:
    """Also what was not set: a resume reads it."""
    run = config(algorithm={"advantage": kind.value, "loss": {"kind": "gspo"}})
    assert check(RunConfig, msgspec.json.decode(run.model_dump_json())) == run


def test_a_group_of_one_cannot_be_filtered_by_its_variance() -> None:
    error = refused(batch={"trajectories": 4, "group_size": 1}, algorithm={"filter_zero_variance": True})
    assert error.path == "algorithm.filter_zero_variance"
    assert "raise batch.group_size" in error.problem


def test_a_temperature_that_logits_cannot_be_divided_by_is_refused() -> None:
    assert config(tasks={"maze": {"temperature": 0.01}}).tasks["maze"].temperature == 0.01
    error = refused(tasks={"maze": {"temperature": 0.0099}})
    assert (error.path, "0.01" in error.problem) == ("tasks.maze.temperature", True)


def test_a_limit_of_what_is_filtered_needs_a_filter() -> None:
    error = refused(algorithm={"filter_limit": 1.0})
    assert error.path == "algorithm.filter_limit"
    assert "filter_zero_variance = true" in error.problem


def test_a_batch_has_a_trajectory_for_every_mini_batch() -> None:
    batch = {"trajectories": 8, "group_size": 4}
    assert config(batch=batch, algorithm={"minibatches": 8}).algorithm.minibatches == 8
    error = refused(batch=batch, algorithm={"minibatches": 9})
    assert (error.path, error.problem) == (
        "algorithm.minibatches",
        "a batch of 8 trajectories cannot be split into 9; lower it or raise batch.trajectories",
    )


# --- what is there --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_preset_is_a_config(preset: Path) -> None:
    assert check(RunConfig, load_toml(preset)).name == preset.stem


def test_a_task_and_a_pool_are_enough() -> None:
    run = config()
    assert (run.mode, run.alpha, run.steps) == (Mode.ROLLART, 1, 10)
    assert run.mode_settings == MODES[Mode.ROLLART]
    assert run.groups == 8
    assert run.groups_per_batch() == {"maze": 8}
    assert run.batch.extra_groups == 0
    assert (run.automatic_extra, run.max_extra) == (True, 2), "redundancy sizes itself"
    assert run.batch.minimum == 4
    assert (run.alpha_of("maze"), run.late_alpha_of("maze"), run.tasks["maze"].stale_retries) == (1, 8, 2)


@pytest.mark.parametrize("mode", [mode for mode in Mode if mode is not Mode.ROLLART])
def test_redundancy_is_off_in_the_other_modes_unless_asked_for(mode: Mode) -> None:
    run = config(mode=mode)
    assert (run.automatic_extra, run.max_extra) == (False, 0)
    assert config(mode=mode, batch={"extra_members": "auto"}).automatic_extra
    assert config(mode=mode, batch={"extra_members": 3}).max_extra == 3


@pytest.mark.parametrize(
    ("size", "minimum", "limit"), [(1, 1, 1), (2, 2, 1), (3, 2, 1), (8, 4, 2), (9, 5, 2), (64, 32, 16)]
)
def test_the_minimum_is_half_a_group_and_the_limit_a_quarter(size: int, minimum: int, limit: int) -> None:
    batch = config(batch={"trajectories": 8 * size, "group_size": size}).batch
    assert (batch.minimum, batch.extra_limit) == (minimum, limit)


@pytest.mark.parametrize("minimum", [1, 9])
def test_a_group_has_a_baseline_and_no_more_than_it_was_promised(minimum: int) -> None:
    error = refused(batch={"min_group_size": minimum})
    assert error.path == "batch.min_group_size"
    assert f"{minimum} is not between 2 and batch.group_size (8)" in error.problem


def test_a_limit_without_anything_to_limit_is_refused() -> None:
    assert refused(batch={"extra_members": 1, "max_extra_members": 2}).path == "batch.max_extra_members"
    assert config(batch={"max_extra_members": 3}).max_extra == 3


def test_tasks_may_have_bounds_of_their_own() -> None:
    run = config(alpha=2, tasks={"maze": {"alpha": 0}, "math": {"late_alpha": 3}}, batch={"trajectories": 64})
    assert [run.alpha_of(task) for task in run.tasks] == [0, 2]
    assert [run.late_alpha_of(task) for task in run.tasks] == [4, 3]
    error = refused(alpha=2, tasks={"maze": {"late_alpha": 1}})
    assert error.path == "tasks.maze.late_alpha"


def test_a_config_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config().steps = 3  # type: ignore[misc]


def test_without_a_task_or_a_pool_there_is_no_run() -> None:
    error = refused(tasks={})
    assert (error.path, error.problem) == ("tasks", "no task is configured; add a table such as [tasks.frozenlake]")
    error = refused(pools={})
    problem = "no pool of engines is configured; add a table such as [pools.local]"
    assert (error.path, error.problem) == ("pools", problem)


# --- the batch ------------------------------------------------------------------------------------------------------


def test_a_batch_is_whole_groups() -> None:
    error = refused(batch={"trajectories": 30, "group_size": 8})
    assert error.path == "batch.trajectories"
    assert error.problem == "30 trajectories do not divide into groups of 8; use 24 or 32"


def test_a_group_fits_into_a_batch() -> None:
    error = refused(batch={"trajectories": 8, "group_size": 9})
    assert error.path == "batch.group_size"
    assert error.problem == (
        "a group of 9 is larger than the batch of 8 trajectories; set batch.trajectories to a multiple of 9"
    )
    assert config(batch={"trajectories": 8, "group_size": 8}).groups == 1


def test_shares_are_relative() -> None:
    tasks: dict[str, dict[str, Any]] = {"maze": {"share": 3}, "math": {"share": 1}}
    assert config(tasks=tasks).groups_per_batch() == {"maze": 6, "math": 2}
    tasks = {"maze": {"share": 0.75}, "math": {"share": 0.25}}
    assert config(tasks=tasks).groups_per_batch() == {"maze": 6, "math": 2}
    tasks = {"maze": {"share": 0.1}, "math": {"share": 0.3}}
    assert config(tasks=tasks).groups_per_batch() == {"maze": 2, "math": 6}, "as written, not as binary fractions"


def test_a_share_is_a_whole_number_of_groups() -> None:
    error = refused(tasks={"maze": {"share": 2}, "math": {"share": 1}})
    assert error.path == "tasks.maze.share"
    assert error.problem == (
        "a share of 0.6667 of 8 groups is 5.333, not a whole number; use a batch of 24 trajectories or a multiple of it"
    )
    batch = {"trajectories": 24, "group_size": 8}
    run = config(batch=batch, tasks={"maze": {"share": 2}, "math": {"share": 1}})
    assert run.groups_per_batch() == {"maze": 2, "math": 1}


def test_the_batch_that_is_proposed_suits_all_tasks() -> None:
    tasks = {"a": {"share": 1}, "b": {"share": 2}, "c": {"share": 3}}
    error = refused(tasks=tasks, batch={"trajectories": 16, "group_size": 4})
    assert error.path == "tasks.a.share"
    assert "use a batch of 24 trajectories" in error.problem
    assert config(tasks=tasks, batch={"trajectories": 24, "group_size": 4}).groups_per_batch() == {
        "a": 1,
        "b": 2,
        "c": 3,
    }


@pytest.mark.parametrize("shares", [(1e-9,), (1.0, 1e-9), (1e-5, 1e-5)])
def test_a_share_that_rounds_to_nothing_is_refused(shares: tuple[float, ...]) -> None:
    error = refused(tasks={f"task{index}": {"share": share} for index, share in enumerate(shares)})
    assert error.path.endswith(".share")
    assert "too small" in error.problem


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 8))
def test_shares_fill_the_batch_that_was_proposed(shares: list[int], group_size: int) -> None:
    tasks = {f"task{index}": {"share": share / 4} for index, share in enumerate(shares)}
    divisor = math.gcd(*shares)
    groups = sum(shares) // divisor
    per_batch = config(tasks=tasks, batch={"trajectories": groups * group_size, "group_size": group_size})
    assert list(per_batch.groups_per_batch().values()) == [share // divisor for share in shares]
    assert sum(per_batch.groups_per_batch().values()) == per_batch.groups


# --- hardware -------------------------------------------------------------------------------------------------------

POOLS: dict[str, dict[str, Any]] = {"fast": {"hardware": "H800"}, "H20": {}, "more": {"hardware": "H20"}}


def test_a_pool_offers_its_hardware_class_or_its_name() -> None:
    assert list(config(pools=POOLS).hardware_classes()) == ["H800", "H20"]


def test_a_task_needs_a_pool_of_its_class() -> None:
    error = refused(pools=POOLS, tasks={"maze": {"hardware": "h80"}})
    assert error.path == "tasks.maze.hardware"
    assert error.problem == ("no pool offers the hardware class 'h80' (did you mean H800?); pools offer H800, H20")
    assert config(pools=POOLS, tasks={"maze": {"hardware": "H800"}}).fallback_of("maze") == ("H20",)


def test_a_class_to_fall_back_to_has_to_be_there_too() -> None:
    error = refused(pools=POOLS, tasks={"maze": {"hardware": "H800", "fallback": ["H20", "A100"]}})
    assert error.path == "tasks.maze.fallback.1"
    assert error.problem.startswith("no pool offers the hardware class 'A100'")


def test_a_missing_class_is_fine_if_the_task_says_what_will_do() -> None:
    run = config(pools=POOLS, tasks={"maze": {"hardware": "B200", "fallback": ["H20"]}})
    assert run.fallback_of("maze") == ("H20",)
    assert refused(pools=POOLS, tasks={"maze": {"hardware": "B200", "fallback": []}}).path == "tasks.maze.hardware"


def test_a_task_falls_back_to_what_it_names_in_order_or_to_everything_else() -> None:
    tasks: dict[str, dict[str, Any]] = {
        "named": {"hardware": "H800", "fallback": ["H20", "H800"]},
        "none": {"hardware": "H800", "fallback": []},
        "any": {},
        "other": {"hardware": "H20"},
    }
    run = config(pools=POOLS, tasks=tasks)
    assert {task: run.fallback_of(task) for task in tasks} == {
        "named": ("H20",),
        "none": (),
        "any": ("H800", "H20"),
        "other": ("H800",),
    }


def test_a_class_is_found_by_measurement_unless_it_is_declared() -> None:
    tasks: dict[str, dict[str, Any]] = {
        "found": {},
        "declared": {"hardware": "H20"},
        "any": {"hardware": "any"},
        "stuck": {"fallback": ["H20"]},
    }
    run = config(pools=POOLS, tasks=tasks, batch={"trajectories": 4, "group_size": 1})
    assert run.automatic_tasks() == {"found": ("H800", "H20")}, "with one class there is nothing to find"
    assert {task: run.declared_class(task) for task in tasks} == {
        "found": None,
        "declared": "H20",
        "any": None,
        "stuck": None,
    }
    assert (
        config(pools=POOLS, tasks=tasks, mode="areal", batch={"trajectories": 4, "group_size": 1}).automatic_tasks()
        == {}
    )


@pytest.mark.parametrize("name", ["auto", "any"])
def test_a_class_cannot_have_a_name_that_means_something_else(name: str) -> None:
    assert refused(pools={name: {}}).path == f"pools.{name}"
    assert refused(pools={"local": {"hardware": name}}).path == "pools.local"
    config(pools={name: {"hardware": "H20"}})


def test_only_the_torch_engine_can_be_slowed() -> None:
    slow = config(pools={"local": {"inject": {"prefill": 3.0}}}).pools["local"].inject
    assert [(each.prefill, each.decode, each.from_s) for each in slow] == [(3.0, 1.0, 0.0)]
    error = refused(pools={"local": {"engine": "vllm", "inject": {"prefill": 3.0}}})
    assert error.path == "pools.local.inject"
    assert refused(pools={"local": {"inject": {"prefill": 0.5}}}).path == "pools.local.inject.prefill"


def test_the_slowdown_that_holds_is_the_last_that_began() -> None:
    slow = (
        config(pools={"local": {"inject": [{"decode": 2.0, "from_s": 10.0}, {"prefill": 3.0}]}}).pools["local"].inject
    )
    assert [slowdown_at(slow, at).prefill for at in (0.0, 9.9, 10.0)] == [3.0, 3.0, 1.0]
    assert slowdown_at(slow, 10.0).decode == 2.0
    assert slowdown_at((), 10.0).decode == 1.0


# --- tasks ----------------------------------------------------------------------------------------------------------


def test_a_turn_leaves_room_in_the_context() -> None:
    error = refused(tasks={"maze": {"max_turn_tokens": 512, "max_context": 512}})
    assert error.path == "tasks.maze.max_turn_tokens"
    assert error.problem == ("one turn of 512 tokens leaves no room in a context of 512; lower it or raise max_context")
    config(tasks={"maze": {"max_turn_tokens": 511, "max_context": 512}})


@pytest.mark.parametrize(
    ("prompts", "eval_prompts", "seeds"),
    [
        ([0, 100], [50, 150], "50 to 99"),
        ([0, 100], [99, 150], "99 to 99"),
        ([50, 150], [0, 51], "50 to 50"),
        ([0, 100], [10, 20], "10 to 19"),
        ([10, 20], [0, 100], "10 to 19"),
    ],
)
def test_held_out_prompts_are_apart_from_those_of_training(
    prompts: list[int], eval_prompts: list[int], seeds: str
) -> None:
    error = refused(tasks={"maze": {"prompts": prompts, "eval_prompts": eval_prompts}})
    assert error.path == "tasks.maze.eval_prompts"
    assert error.problem == f"seeds {seeds} are also used for training; the ranges must be disjoint"


@pytest.mark.parametrize(
    ("prompts", "eval_prompts"), [([0, 100], [100, 150]), ([100, 150], [0, 100]), ([0, 1], [1, 2])]
)
def test_they_may_touch(prompts: list[int], eval_prompts: list[int]) -> None:
    config(tasks={"maze": {"prompts": prompts, "eval_prompts": eval_prompts}})


@pytest.mark.parametrize("key", ["prompts", "eval_prompts"])
@pytest.mark.parametrize("seeds", [[5, 5], [6, 5], [-1, 5]])
def test_a_range_of_seeds_is_not_empty(key: str, seeds: list[int]) -> None:
    error = refused(tasks={"maze": {"prompts": [100, 200], key: seeds}})
    assert error.path == f"tasks.maze.{key}"
    assert "give [first, past-the-last]" in error.problem


def test_the_second_task_is_checked_like_the_first() -> None:
    assert refused(tasks={"maze": {}, "math": {"hardware": "A100"}}).path == "tasks.math.hardware"


# --- rewards --------------------------------------------------------------------------------------------------------


def rewards(*given: Any, **task: Any) -> dict[str, Any]:
    return {"tasks": {"maze": {"rewards": list(given), **task}}}


def test_a_task_has_the_sum_of_the_turns_unless_it_names_another_reward() -> None:
    def paths(**task: Any) -> list[str]:
        return [reward.function for reward in config(tasks={"maze": task}).tasks["maze"].all_rewards]

    assert paths() == [EPISODE_RETURN]
    assert paths(reward="mine.py:correct") == ["mine.py:correct"]
    assert paths(rewards=["mine.py:correct", {"function": "judges:Judge.kind"}]) == [
        "mine.py:correct",
        "judges:Judge.kind",
    ]


def test_a_reward_runs_in_threads_unless_it_names_another_place() -> None:
    given = rewards("a:b", {"function": "c:d", "run": "processes", "slots": 2}, {"name": "e", "run": "https://h/e?v=1"})
    places = config(**given).tasks["maze"].all_rewards
    assert [(each.run, each.concurrency, each.remote) for each in places] == [
        ("threads", 4, False),
        ("processes", 2, False),
        ("https://h/e?v=1", 64, True),
    ]


@pytest.mark.parametrize(("pattern", "why"), [("(", "not a regular expression"), ("x*", "matches the empty text")])
def test_patterns_that_cannot_be_redacted_are_refused(pattern: str, why: str) -> None:
    error = refused(redact=["key-[0-9]+", pattern])
    assert error.path == "redact.1"
    assert why in str(error)


def test_rewards_are_named_after_their_functions() -> None:
    task = config(**rewards("mine.py:correct", "judges:Judge.kind", {"function": "x:y", "name": "z"})).tasks["maze"]
    assert [reward.label for reward in task.all_rewards] == ["correct", "kind", "z"]


@pytest.mark.parametrize(
    ("tables", "path", "why"),
    [
        (rewards("a:b", reward="c:d"), "tasks.maze.reward", "besides rewards"),
        (rewards("a:b", "c:b"), "tasks.maze.rewards.1.name", "'b' is also that of reward 0"),
        (rewards({"weight": 2}), "tasks.maze.rewards.0.function", "is missing"),
        (rewards({"name": "a/b"}), "tasks.maze.rewards.0.name", "slash"),
        (rewards({"function": "a:b", "default": 0}), "tasks.maze.rewards.0.default", "every reward has a default"),
        (rewards({"function": "a:b", "weihgt": 0}), "tasks.maze.rewards.0.weihgt", "did you mean weight"),
        (rewards({"function": "a:b", "weight": math.inf}), "tasks.maze.rewards.0.weight", "finite"),
        (rewards({"function": "a:b", "deadline_s": 0}), "tasks.maze.rewards.0.deadline_s", "greater than 0"),
        (rewards({"function": "a:b", "run": "thread"}), "tasks.maze.rewards.0.run", "did you mean threads"),
        (rewards({"function": "a:b", "run": "https://"}), "tasks.maze.rewards.0.run", "names no host"),
        (rewards({"function": "a:b", "run": "https://h:x/"}), "tasks.maze.rewards.0.run", "is not a URL"),
        (rewards({"function": "a:b", "run": "https://u:p@h/"}), "tasks.maze.rewards.0.run", "environment variable"),
        (rewards({"function": "a:b", "run": "https://h/#x"}), "tasks.maze.rewards.0.run", "never sent"),
        (rewards({"function": "a:b", "batch": 4}), "tasks.maze.rewards.0.batch", "behind a URL"),
        (rewards({"function": "a:b", "cpus": 2}), "tasks.maze.rewards.0.cpus", "for actors"),
        (rewards({"function": "a:b", "slots": 0}), "tasks.maze.rewards.0.slots", "greater than or equal to 1"),
        (rewards({"function": "a:b", "run": "https://h", "secret": "s3cr-t"}), "tasks.maze.rewards.0.secret", "name"),
        (rewards({"run": "https://h"}), "tasks.maze.rewards.0.name", "needs a name"),
        (
            rewards({"run": "https://h", "name": "a", "fallback": True}),
            "tasks.maze.rewards.0.fallback",
            "needs the function",
        ),
    ],
)
def test_rewards_that_cannot_be_meant_are_refused(tables: dict[str, Any], path: str, why: str) -> None:
    error = refused(**tables)
    assert error.path == path
    assert why in str(error)


def test_limits_of_an_episode() -> None:
    task = config(tasks={"maze": {"max_turns": 3, "max_context": 200}}).tasks["maze"]
    assert task.limit_reached(2, 199) is None
    assert task.limit_reached(3, 199) is Truncation.TURNS
    assert task.limit_reached(2, 200) is Truncation.CONTEXT


def test_a_tool_call_ends_before_its_step() -> None:
    tools = {"tools": ["my_tools:search"], "step_deadline_s": 60.0}
    error = refused(tasks={"maze": {**tools, "tool_timeout_s": 60.0}})
    assert error.path == "tasks.maze.tool_timeout_s"
    assert "is 60, and a step is given up after 60 s" in str(error)
    config(tasks={"maze": {**tools, "tool_timeout_s": 59.0}})
