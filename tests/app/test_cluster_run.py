"""Runs on a trial cluster: two labelled Ray nodes of this machine."""

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_cli import COMMAND, CONFIG, MAZE, rollart, small_task
from trial import Trial

from rollart.observe.journal import fold_journal, read_journal
from rollart.types.journal import StepTrained, WorkerLeaves, WorkerLeft, WorkerPlaced

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

H20 = """
[pools.H20]
accelerator = "H20"
ranks = 1
"""
ON_H20 = CONFIG.replace("[pools.local]", H20)


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    cluster = Trial("cpu=1,H20=2")
    yield cluster
    cluster.close()


def test_workers_run_where_they_prefer_to_with_the_code_of_the_user(trial: Trial, tmp_path: Path) -> None:
    small_task(tmp_path)
    (tmp_path / "config.toml").write_text(ON_H20)
    done = trial.call("train", "config.toml", "--address", "auto", "--out", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    violations, report = fold_journal(tmp_path / "run" / "journal.sqlite")[1].finish()
    assert (violations, report is None) == ([], False)
    events = list(read_journal(tmp_path / "run" / "journal.sqlite"))
    kinds = {event.worker.split("/")[0]: event.node.split()[0] for event in events if isinstance(event, WorkerPlaced)}
    assert kinds == {"engine": "H20", "environment": "cpu", "reward": "cpu", "trainer": "cpu"}
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_a_run_that_can_never_be_placed_is_refused_before_anything_is_written(trial: Trial, tmp_path: Path) -> None:
    small_task(tmp_path)
    (tmp_path / "config.toml").write_text(ON_H20.replace("H20", "H800"))
    for words in (("--dry-run",), ("--out", "run")):
        done = trial.call("train", "config.toml", "--address", "auto", *words, cwd=tmp_path)
        assert done.code == 2
        assert "the cluster cannot take this run: engine/H800/0 (pool H800) needs 1 GPU, 1 CPU" in done.err
        assert "the cluster has 2 × H20 with 4 CPUs and 1 GPUs, 1 × cpu with 4 CPUs" in done.err
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_the_placement(trial: Trial, tmp_path: Path) -> None:
    small_task(tmp_path)
    (tmp_path / "config.toml").write_text(ON_H20)
    done = trial.call("train", "config.toml", "--address", "auto", "--dry-run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "engine/H20/0" in done.out
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_code_that_a_node_cannot_import_is_named_with_the_node(trial: Trial, tmp_path: Path) -> None:
    small_task(tmp_path, "import only_here\n" + MAZE)
    (tmp_path / "only_here.py").write_text("")
    (tmp_path / ".rayignore").write_text("only_here.py\n")
    done = trial.call("train", "config.toml", "--address", "auto", "--out", "run", cwd=tmp_path)
    assert done.code == 1
    assert "No module named 'only_here'" in done.err
    assert "(on node cpu 127.0.0.1" in done.err


def test_a_folder_that_is_too_large_to_travel_is_refused(trial: Trial, tmp_path: Path) -> None:
    small_task(tmp_path)
    (tmp_path / "data").mkdir()
    with (tmp_path / "data" / "large.bin").open("wb") as file:
        file.truncate(200 * 2**20)
    done = trial.call("train", "config.toml", "--address", "auto", "--out", "run", cwd=tmp_path)
    assert done.code == 2
    assert "most of it in data" in done.err


def test_the_doctor_asks_every_node(trial: Trial, tmp_path: Path) -> None:
    done = trial.call("doctor", "--address", "auto", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert len(found["nodes"]) == 3
    for health in found["nodes"]:
        answer = health["answer"]
        assert answer["packages"]["ray"] == importlib.metadata.version("ray")
        assert answer["link"]["trip_s"] > 0
        assert abs(answer["link"]["offset_s"]) < 1.0  # one machine has one clock
    small_task(tmp_path)
    (tmp_path / "config.toml").write_text(ON_H20.replace("ranks = 1", 'ranks = 1\npython = "not-there/python"'))
    done = trial.call("doctor", "config.toml", "--address", "auto", cwd=tmp_path)
    assert done.code == 1
    wrong = [line for line in done.out.splitlines() if line.startswith("bad")]
    assert len(wrong) == 2  # on the two nodes of the pool, not on the third
    assert all("not-there/python: there is no such executable file" in line for line in wrong)


@pytest.mark.long
def test_nothing_fails_when_a_node_drains(tmp_path: Path) -> None:
    trial = Trial("cpu=2,H20=2")
    small_task(tmp_path)
    config = ON_H20.replace("steps = 2", "steps = 40").replace("[batch]", "[deadlines]\ndrain_s = 60\n[batch]")
    (tmp_path / "config.toml").write_text(config.replace("max_turns", "inject = { latency_ms = 50.0 }\nmax_turns"))
    try:
        words = ("train", "config.toml", "--address", "auto", "--out", "run", "--json")
        environment = {**os.environ, "TMPDIR": trial.tmp}
        run = subprocess.Popen(
            [*COMMAND, *words], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for line in run.stderr:
            if line.startswith("step 3/"):
                break
        shown = json.loads(trial.call("cluster", "show", "--json", cwd=tmp_path).out)
        engine = next(worker for worker in shown["workers"] if worker["worker"].startswith("engine/"))
        done = trial.call("cluster", "drain", engine["node"], cwd=tmp_path)
        assert done.code == 0, done.err
        out, err = run.communicate(timeout=200)
        assert run.returncode == 0, err
    finally:
        trial.close()
    events = list(read_journal(tmp_path / "run" / "journal.sqlite"))
    assert [event.worker for event in events if isinstance(event, WorkerLeaves)] == ["engine/H20/0.0"]
    assert [event.unfinished for event in events if isinstance(event, WorkerLeft)] == [False]
    assert sum(isinstance(event, StepTrained) for event in events) == 40
    outcomes = json.loads(out)["outcomes"]
    assert not {"env_failed", "engine_failed", "reward_failed"} & {key for key, count in outcomes.items() if count}
    assert fold_journal(tmp_path / "run" / "journal.sqlite")[1].finish()[0] == []


def test_a_cluster_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    small_task(tmp_path)
    done = rollart("train", "config.toml", "--address", "127.0.0.1:1", cwd=tmp_path)
    assert done.code == 2
    assert "--address 127.0.0.1:1: cannot connect to this Ray (nothing answers there)" in done.err
