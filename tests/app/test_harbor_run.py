"""Runs on folders of Harbor tasks: their prompts are the folders, and what cannot be played is refused before."""

import os
from pathlib import Path

import harbor_folders
import pytest
import sandbox_parts

import rollart
from rollart.app.environment_check import check_environment
from rollart.app.task_checks import check_kind, prompts_of
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.types.errors import ConfigError

LIMITS = {"step_deadline_s": 780.0, "max_turns": 3, "max_turn_tokens": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with sandbox_parts.public_folder() as made, sandbox_parts.own_sandboxes(made):
        pass  # skips where there are no sandboxes
    return harbor_folders.write_all(tmp_path / "tasks")


def config_of(folder: Path, **settings: object) -> RunConfig:
    task = {"environment": f"harbor:{folder}", **LIMITS, **settings}
    return check(RunConfig, {"tasks": {"fix": task}, "pools": {"local": {}}})


def test_prompts_are_the_folders(folder: Path) -> None:
    sides = {}
    for held_out in (False, True):
        prompts = prompts_of(config_of(folder), "fix", held_out=held_out)
        sides[held_out] = {str(prompts.next().id) for _ in range(20)}
    assert sides[True]
    assert not sides[True] & sides[False]
    assert sides[True] | sides[False] == set(harbor_folders.TASKS)
    again = prompts_of(config_of(folder), "fix", held_out=False)
    (folder / "hello" / "instruction.md").write_text("Changed.")
    assert prompts_of(config_of(folder), "fix", held_out=False).cursor()["digest"] != again.cursor()["digest"]


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        ({"step_deadline_s": 779.0}, "step_deadline_s", "grading collected 660 s, so set it to 780 or more"),
        ({"python": "python3"}, "python", "is not for Harbor tasks"),
        ({"environment": "harbor:nowhere"}, "environment", "nowhere is no folder"),
        ({"environment_settings": {"offlin": True}}, "environment", "offlin"),
        ({"environment_settings": {"environment_mode": "mine"}}, "environment", "'shared' or 'separate'"),
        ({"system": "Be brief."}, "system", "is for tasks without an environment"),
    ],
)
def test_what_cannot_be_played_is_refused(folder: Path, settings: dict[str, object], key: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_kind(config_of(folder, **settings), "fix")
    assert refused.value.path == f"tasks.fix.{key}"
    assert said in str(refused.value)


def test_env_check_plays_the_oracle(folder: Path) -> None:
    config = config_of(folder / "hello", held_out_share=0.0)
    result = check_environment(config, "fix", episodes=1)
    assert result.players["scripted"].mean_reward == 1.0
    assert result.players["random"].highest_reward == 0.0
    assert result.passed, result.problems


@pytest.mark.parametrize("runtime", ["inline", pytest.param("ray", marks=pytest.mark.long)])
def test_a_training_on_task_folders(folder: Path, tmp_path: Path, runtime: str) -> None:
    """Four steps; the relative path is that of the caller, also for workers elsewhere."""
    here = Path.cwd()
    os.chdir(folder.parent)
    try:
        task = rollart.Task("harbor:tasks", environments=4, eval_episodes=1, **LIMITS)  # type: ignore[arg-type]
        result = rollart.run(
            tasks={"fix": task},
            model=rollart.tiny_model(),
            steps=4,
            eval_every=4,
            batch={"trajectories": 8, "group_size": 4},
            runtime=runtime,
            out=tmp_path / "run",
        )
    finally:
        os.chdir(here)
    assert result.held_out["fix"].after == 0.0
    assert result.checkpoint is not None
    assert result.checkpoint.name.startswith("step-00000004")
