"""`rollart.Task`: its signature, the prompts it takes, and runs of tasks that have no environment."""

import importlib.util
import inspect
import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_cli import CONFIG, rollart

import rollart as api
from rollart.app.api import merged
from rollart.app.compose import check_real
from rollart.app.given_prompts import keep_rows, located, rows_or_seeds
from rollart.app.task_checks import prompts_of
from rollart.config.load import check
from rollart.config.rows import Rows
from rollart.config.schema import RunConfig
from rollart.config.tasks import TaskSettings
from rollart.observe.journal import read_journal
from rollart.types import journal as j
from rollart.types.errors import ConfigError, RequestError
from rollart.types.trajectory import Purpose

ROOT = Path(__file__).parents[2]
QUESTIONS = [{"question": f"{a}+{b}?", "answer": str(a + b)} for a in range(8) for b in range(8)]
SMALL = {"max_turn_tokens": 4, "max_context": 200, "environments": 8}
MODEL = api.tiny_model()


def correct(t: api.Transcript) -> float:
    return float(t.prompt["answer"] in t.final_text)


def lengthy(t: api.Transcript) -> float:
    return len(t.final_text) / 4 + float(len(t.prompt["answer"]))


# --- the signature --------------------------------------------------------------------------------------------------


def test_the_signature_is_that_of_the_settings() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "task_signature.py", "--check"], check=False)
    assert done.returncode == 0, "run: make task-signature"
    signature = inspect.signature(api.Task.__init__)
    assert set(signature.parameters) - {"self", "unknown"} == set(TaskSettings.model_fields)
    text = inspect.getdoc(api.Task.__init__) or ""
    assert all(f"\n    {name}: " in text for name in TaskSettings.model_fields)


@pytest.mark.long
def test_a_type_checker_sees_the_settings(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import rollart\n"
        "rollart.Task(prompts=[{'q': 1}], reward='a:b', max_turns=3, tools=[print], stale='mask')\n"
        "rollart.Task(prompts=range(5), max_turns='3')\n"
        "rollart.Task('a:b', max_turn=3)\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "", "--strict", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"MYPYPATH": str(ROOT / "src")})
    found = [line.split(": ", 2)[0].rpartition(":")[2] for line in done.stdout.splitlines() if str(script) in line]
    assert found == ["3", "4"], done.stdout


# --- what prompts may be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (range(0, 10, 2), "step of 1"),
        (3, "is a int"),
        ([], "has no rows"),
        (["a"], "row 0 is a str, not a dict"),
        ([{"a": 1}, {"b": object()}], "row 1: the field 'b' is a object, which is not JSON"),
        ({"train": [], "test": []}, "is one dict of train, test; give one of these"),
    ],
)
def test_what_no_prompts_are(given: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        api.Task(prompts=given)
    assert problem in str(caught.value)


def test_an_iterable_is_read_once() -> None:
    reads = []

    def rows() -> Any:
        reads.append(1)
        yield {"question": "1+1?", "answer": np.int64(2), "parts": np.array([1, 1])}

    task = api.Task(prompts=rows(), reward=correct)
    assert isinstance(task.prompts, Rows)
    assert json.loads(task.prompts.lines) == {"question": "1+1?", "answer": 2, "parts": [1, 1]}
    merged({}, {"tasks": {"sum": task}})
    assert reads == [1]


def test_a_dataset_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install 'rollart[data]'")
    rows = datasets.Dataset.from_list(QUESTIONS)
    assert rows_or_seeds("prompts", rows) == rows_or_seeds("prompts", QUESTIONS)
    assert rows_or_seeds("prompts", rows.to_iterable_dataset()) == rows_or_seeds("prompts", QUESTIONS)
    with pytest.raises(ConfigError, match="is one DatasetDict of train; give one of these"):
        api.Task(prompts=datasets.DatasetDict({"train": rows}))
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.to_json(tmp_path / "rows.jsonl")
    found = []
    for source in ("rows.parquet", "rows.jsonl", "."):
        task = api.Task(prompts=tmp_path / source, reward=correct, held_out_share=0.0)
        config = check(RunConfig, {"tasks": {"sum": merged({}, {"": task})[""]}, "pools": {"local": {}}})
        prompts = prompts_of(config, "sum", held_out=False)
        found.append(sorted(json.dumps(prompts.next().data) for _ in range(64)))
    assert found[0] == found[1] == sorted(json.dumps(row) for row in QUESTIONS)
    assert len(found[2]) == 64
    rows.save_to_disk(tmp_path / "disk")
    with pytest.raises(ConfigError, match="load_from_disk"):
        check_real(config_of(api.Task(prompts=tmp_path / "disk", reward=correct)))


def config_of(*tasks: api.Task, **changes: Any) -> RunConfig:
    named = {f"t{number}": task for number, task in enumerate(tasks)}
    return check(RunConfig, merged({"pools": {"local": {}}, "model": MODEL}, {"tasks": named, **changes}))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"prompt": "{qestion}"}, "t0.prompts: row '1': has no field 'qestion' (did you mean question?)"),
        ({"prompt": "{question"}, "write {{ and }} for braces"),
        ({"prompt": "{question!r}"}, "a field that is not {name}"),
        ({"prompts": [{"a": number} for number in range(9)]}, "has none of the fields prompt, messages"),
        ({"prompts": [{"messages": [{"role": "usr", "content": ""}], "n": n} for n in range(9)]}, "has the role 'usr'"),
        ({"reward": None}, "t0.reward: is missing"),
        ({"environment": "rollart.tasks.frozenlake:FrozenLake", "system": "x"}, "t0.system: is for tasks without"),
        ({"eval_prompts": QUESTIONS[:3]}, "3 of 3 rows are also in prompts"),
        ({"held_out_share": 0.0, "eval_episodes": 2}, "t0.held_out_share: the given data has no prompts held out"),
    ],
)
def test_a_task_that_cannot_work_is_refused_before_the_run(settings: dict[str, Any], problem: str) -> None:
    task = api.Task(**{"prompts": QUESTIONS, "reward": correct, **settings})
    with pytest.raises(ConfigError) as caught:
        check_real(config_of(task))
    assert problem in str(caught.value)


def test_rows_are_kept_in_the_folder_of_the_run(tmp_path: Path) -> None:
    task = api.Task(prompts=QUESTIONS, reward=correct, eval_prompts=[{"question": "9+9?", "answer": "18"}])
    kept = keep_rows(config_of(task), tmp_path)
    assert kept.tasks["t0"].prompts == "{run}/prompts/t0.jsonl"
    assert located(kept, tmp_path).tasks["t0"].eval_prompts == str(tmp_path / "prompts" / "t0-eval.jsonl")
    source = prompts_of(located(kept, tmp_path), "t0", held_out=False)
    source.seek(prompts_of(config_of(task), "t0", held_out=False).cursor())
    with pytest.raises(ConfigError, match="differs from the rows that the run was started with"):
        keep_rows(config_of(api.Task(prompts=QUESTIONS[1:], reward=correct)), tmp_path)


def test_configs_of_earlier_versions_are_read() -> None:
    old = check(TaskSettings, {"prompts": [0, 100], "prompt_path": "", "eval_prompts": [100, 200]})
    assert old.prompts == (0, 100)
    assert check(TaskSettings, {"prompts": [0, 100], "prompt_path": "p.jsonl"}).prompts == "p.jsonl"


# --- runs -----------------------------------------------------------------------------------------------------------


def test_rows_and_a_reward_are_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snippet 1: two steps, evaluation included, then a resume from the folder alone."""
    monkeypatch.chdir(tmp_path)
    task = api.Task(
        prompts=iter(QUESTIONS),
        reward=lengthy,
        system="Add.",
        prompt="{question} ",
        eval_episodes=3,
        eval_samples=4,
        pass_reward=2.0,
        **SMALL,
    )
    batch = {"trajectories": 8, "group_size": 4}
    result = api.run(model=MODEL, tasks={"sum": task}, batch=batch, steps=2, eval_every=1, out="run")
    assert result.report.steps == 2
    held_out = result.held_out["sum"]
    assert held_out.after is not None
    assert list(held_out.pass_after) == [1, 2, 4]
    assert list(held_out.pass_after.values()) == sorted(held_out.pass_after.values())
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["pass_at"].keys() for line in lines if "pass_at" in line] == [{"1", "2", "4"}] * 3
    opened = [event for event in read_journal(Path("run/journal.sqlite")) if isinstance(event, j.GroupOpened)]
    evals = Counter(event.prompt for event in opened if event.purpose is Purpose.EVAL)
    assert len(evals) == 3
    assert set(evals.values()) == {3 * 4}, "four attempts in each of three rounds"
    texts = "".join(path.read_text() for path in Path("run/trajectories").glob("*.txt"))
    assert "--- observation\nAdd.\n" in texts
    before = [e.prompt.id for e in read_journal(Path("run/journal.sqlite")) if isinstance(e, j.PromptTaken)]
    moved = tmp_path / "elsewhere"
    Path("run").rename(moved)
    assert api.run(resume=moved, steps=3).report.steps == 3
    assert json.loads((moved / "config.json").read_text())["tasks"]["sum"]["prompts"] == "{run}/prompts/sum.jsonl"
    after = [e.prompt.id for e in read_journal(moved / "journal.sqlite") if isinstance(e, j.PromptTaken)]
    assert after[: len(before)] == before
    assert len(set(after)) == len(after), "no prompt is repeated within a pass"
    prompts = moved / "prompts" / "sum.jsonl"
    rows = prompts.read_text()
    prompts.write_text(json.dumps({"question": "?", "answer": "?"}) + "\n")
    with pytest.raises(RequestError, match="has no prompts"):
        api.run(resume=moved, steps=4)
    prompts.write_text(rows.replace("1", "7"))
    threads = set(threading.enumerate())
    with pytest.raises(RequestError, match="digest"):
        api.run(resume=moved, steps=4)
    for thread in set(threading.enumerate()) - threads:
        if thread.name == "journal":
            thread.join(60.0)
            assert not thread.is_alive(), "the journal is closed"


@pytest.mark.parametrize("runtime", ["inline", pytest.param("ray", marks=pytest.mark.long)])
def test_the_same_in_toml(tmp_path: Path, runtime: str) -> None:
    if runtime == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'rollart[ray]'")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (tmp_path / "rewards.py").write_text(
        "def correct(t):\n    return len(t.final_text) / 4 + len(t.prompt['answer'])\n"
    )
    text = CONFIG.replace('environment = "maze.py:Maze"', 'prompts = "rows.jsonl"\nreward = "rewards.py:correct"')
    (tmp_path / "config.toml").write_text(text)
    done = rollart("train", "config.toml", "--runtime", runtime, "--out", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert rollart("audit", "run", cwd=tmp_path).code == 0


SCRIPT = """
import rollart
import rewards

if __name__ == "__main__":
    rows = ({"question": f"{a}+{b}?", "answer": str(a + b)} for a in range(8) for b in range(8))
    task = rollart.Task(prompts=rows, reward=rewards.correct, max_turn_tokens=4, max_context=200, environments=8)
    batch = {"trajectories": 8, "group_size": 4}
    model = rollart.tiny_model()
    rollart.run(model=model, tasks={"sum": task}, batch=batch, steps=500, checkpoint_every=1, out="run")
"""


@pytest.mark.long
@pytest.mark.parametrize("runtime", ["inline", "ray"])
def test_a_killed_run_goes_on_from_its_folder_alone(tmp_path: Path, runtime: str) -> None:
    """The script, which is gone by then, gave a generator."""
    if runtime == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'rollart[ray]'")
    (tmp_path / "rewards.py").write_text("def correct(t):\n    return len(t.final_text) + len(t.prompt['answer'])\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, script], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 4/"):
            break
    process.kill()
    process.wait()
    process.stderr.close()
    script.unlink()
    path = {"PYTHONPATH": str(tmp_path)}
    resumed = ("train", "--resume", "run", "--runtime", runtime, "--set", "steps=8")
    done = rollart(*resumed, cwd=tmp_path, **path)
    assert done.code == 0, done.err
    audit = rollart("audit", "run", cwd=tmp_path)
    assert audit.code == 0, audit.out
    taken = [e.prompt.id for e in read_journal(tmp_path / "run" / "journal.sqlite") if isinstance(e, j.PromptTaken)]
    assert len(set(taken)) == len(taken), "no prompt is repeated within a pass"
