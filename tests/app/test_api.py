"""The Python API: what it takes, what it gives, and that it is the command under another name."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_cli import CONFIG, rollart, small_task

import rollart as api
from rollart.app.api import merged
from rollart.config.load import check, load_toml
from rollart.config.schema import RunConfig
from rollart.config.tasks import TaskSettings
from rollart.observe.report import Report
from rollart.tasks.frozenlake import FrozenLake
from rollart.types.errors import ConfigError, RequestError
from rollart.types.journal import EvalEnded

LAKE = "rollart.tasks.frozenlake:FrozenLake"
RETURN = "rollart.backends.rewards.functions:episode_return"


def judged(t: api.Transcript) -> float:
    return float(len(t.final_text))


def test_the_public_names() -> None:
    assert set(api.__all__) == {
        "ConfigError", "EnvironmentFault", "Group", "HeldOut", "Member", "Prompt", "RequestError", "Result",
        "RollartError", "RunConfig", "RunError", "SftResult", "StepRecord", "Stop", "Task", "TextEnvironment",
        "TextStep", "Transcript", "mcp", "run", "sft", "tiny_model",
    }  # fmt: skip
    assert all(getattr(api, name) is not None for name in api.__all__)
    assert set(api.__all__) <= set(dir(api))
    with pytest.raises(AttributeError, match="'tasks_of'"):
        api.tasks_of  # noqa: B018


def test_importing_it_is_light() -> None:
    code = (
        "import sys, rollart\nheavy = {'torch', 'transformers', 'gymnasium', 'ray', 'numpy', 'pydantic', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "rollart.Task('rollart.tasks.frozenlake:FrozenLake')\nprint('torch' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout == "[]\nFalse False\n"


# --- tasks and configs ----------------------------------------------------------------------------------------------


def test_a_task_is_its_settings_with_paths_for_what_was_given() -> None:
    task = api.Task(FrozenLake, judged, share=0.5, hardware="fast", max_turns=3)
    assert isinstance(task, TaskSettings)
    assert task.model_dump(exclude_unset=True) == {
        "environment": LAKE,
        "reward": f"{__name__}:judged",
        "share": 0.5,
        "hardware": "fast",
        "max_turns": 3,
    }
    assert [reward.function for reward in api.Task(LAKE).all_rewards] == [RETURN]


def test_a_task_may_have_several_rewards() -> None:
    task = api.Task(FrozenLake, rewards=[judged, {"function": judged, "name": "again", "weight": 0.2, "default": 0}])
    assert [(reward.label, reward.function, reward.weight, reward.default) for reward in task.all_rewards] == [
        ("judged", f"{__name__}:judged", 1.0, None),
        ("again", f"{__name__}:judged", 0.2, 0.0),
    ]
    tables = merged({}, {"tasks": {"lake": task}})
    assert check(TaskSettings, tables["tasks"]["lake"]).all_rewards == task.all_rewards
    with pytest.raises(ConfigError, match="did you mean weight"):
        api.Task(FrozenLake, rewards=[{"function": judged, "wieght": 2}])


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_turn": 3}, "did you mean max_turns?"), ({"share": -1.0}, "share: "), ({"unfilled": "stopp"}, "stop")],
)
def test_a_task_is_checked_when_it_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        api.Task(FrozenLake, **settings)
    assert message in str(caught.value)


def test_a_lambda_is_refused_when_the_task_is_made() -> None:
    with pytest.raises(RequestError, match="lambda"):
        api.Task(FrozenLake, lambda _: 1.0)


def test_what_is_laid_over_a_config_is_checked_with_it() -> None:
    tables = {"steps": 3, "tasks": {"lake": {"environment": LAKE, "share": 2.0}}, "pools": {"local": {}}}
    over = merged(tables, {"steps": 5, "tasks": {"lake": {"share": 1.0}, "other": api.Task(FrozenLake)}})
    assert over == {
        "steps": 5,
        "tasks": {"lake": {"environment": LAKE, "share": 1.0}, "other": {"environment": LAKE}},
        "pools": {"local": {}},
    }
    assert tables["steps"] == 3, "what was given stays as it is"
    own = merged({"tasks": {"lake": api.Task(FrozenLake, share=2.0)}}, {"tasks": {"lake": {"max_turns": 4}}})
    assert own == {"tasks": {"lake": {"environment": LAKE, "share": 2.0, "max_turns": 4}}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"runtime": "rai"}, "did you mean ray?"),
        ({"config": 3}, "config is a int"),
        ({"config": "nowhere.toml"}, "no such config file"),
        ({"resume": "nowhere"}, "give the folder of a run"),
        ({"resume": "x", "out": "y"}, "omit config and out"),
        ({"stepps": 3}, "did you mean steps?"),
        ({"tasks": {"lake": api.Task(FrozenLake)}}, "model: is missing"),
    ],
)
def test_a_wrong_request_is_an_error_and_starts_nothing(
    arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError) as caught:
        api.run(**arguments)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_before_and_after() -> None:
    rounds = [("a", 0, 0.25), ("b", 0, None), ("a", 5, 0.5), ("b", 5, 0.75), ("a", 10, 1.0)]
    report = Report(evaluations=[EvalEnded(0.0, task, step, 8, 8, mean) for task, step, mean in rounds])
    held_out = api.Result(Path(), report).held_out
    assert {task: found[:2] for task, found in held_out.items()} == {"a": (0.25, 1.0), "b": (None, 0.75)}


# --- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_is_that_of_the_command_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = check(RunConfig, load_toml(Path("config.toml")))
    first = api.run(config, out="run", eval_every=2, tasks={"maze": {"eval_episodes": 4}})
    assert first.folder == Path("run")
    assert first.report.steps == 2
    assert set(first.held_out) == {"maze"}
    kept = json.loads((tmp_path / "run" / "config.json").read_text())
    assert kept["tasks"]["maze"]["environment"] == "maze.py:Maze"
    assert rollart("audit", "run", cwd=tmp_path).code == 0
    texts = "".join(path.read_text() for path in (tmp_path / "run" / "trajectories").iterdir())
    assert "maze, train, prompt" in texts
    assert "maze, eval, prompt" in texts
    assert "--- observation\nmaze " in texts
    with pytest.raises(ConfigError, match="batch: cannot change"):
        api.run(resume="run", batch={"group_size": 2})
    with pytest.raises(ConfigError, match="steps: the run has already trained 2 steps"):
        api.run(resume="run", steps=1)
    assert api.run(resume="run").report.steps == 2, "there is nothing left to do"
    with pytest.raises(RequestError, match="not an empty folder"):
        api.run("config.toml", out="run")
    assert api.run(resume="run", steps=3).report.steps == 3
    assert api.run(resume="run").report.steps == 3, "a resume keeps what an earlier one changed"


def test_inside_an_event_loop_it_just_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_task(tmp_path)
    monkeypatch.chdir(tmp_path)

    async def notebook() -> api.Result:
        return api.run("config.toml", steps=1)

    result = asyncio.run(notebook())
    assert result.report.steps == 1
    assert result.checkpoint is not None


def test_classes_of_a_session_are_refused_where_workers_are_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
    small_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "Typed", FrozenLake, raising=False)
    with pytest.raises(
        RequestError, match=r'Typed was defined in a notebook.*Use runtime="inline", or write it to a fi'
    ):
        api.run("config.toml", tasks={"maze": {"environment": "__main__:Typed"}}, runtime="ray", out="run")
    assert not (tmp_path / "run").exists()


SCRIPT = """
import rollart

class Maze:
    def reset(self, *, seed=None, options=None):
        return f"maze {seed}", {}

    def step(self, action):
        return "next", 0.0, True, False, {}

def judged(t: rollart.Transcript) -> float:
    return float(len(t.final_text))

def main(runtime):
    task = rollart.Task(Maze, judged, environments=8, max_turn_tokens=4, max_context=200)
    result = rollart.run("config.toml", tasks={"maze": task}, steps=1, out="run", runtime=runtime)
    print(result.report.steps)

"""


@pytest.mark.parametrize("runtime", ["inline", "ray"])
def test_a_script_with_classes_of_its_own(tmp_path: Path, runtime: str) -> None:
    if runtime == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
    small_task(tmp_path)
    (tmp_path / "script.py").write_text(f'{SCRIPT}if __name__ == "__main__":\n    main("{runtime}")\n')
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
    assert rollart("train", "--resume", "run", "--runtime", "inline", "--set", "steps=2", cwd=tmp_path).code == 0


def test_a_script_without_a_guard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "script.py").write_text(f'{SCRIPT}main("inline")\n')
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1
    assert 'Put the call under: if __name__ == "__main__":' in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()
