"""`rollart bench learn --work latency`: the committed work, and evaluation by kind in a tiny one."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rollart.app import cold_start
from rollart.app.api import merged
from rollart.app.evaluation import play
from rollart.app.running import RuntimeKind
from rollart.bench.common import read_tables
from rollart.bench.learn import Work, show
from rollart.bench.learn_run import SYNC, T_975, Bench
from rollart.cli.main import main
from rollart.config.load import check
from rollart.config.schema import BatchSettings, RunConfig
from rollart.types import journal as j

WORK = Work.LATENCY.file


def test_the_committed_work_is_what_the_command_says() -> None:
    tables = read_tables(WORK)
    configs = {
        arm: check(RunConfig, {**merged(tables["run"], changes), "model": tables["model"]})
        for arm, changes in tables["arms"].items()
    }
    assert {arm: config.mode.value for arm, config in configs.items()} == {
        SYNC: "sync",
        "rollart": "rollart",
        "plain": "rollart",
    }
    assert len(set(tables["seeds"])) == 5 <= len(T_975) + 1
    for config in configs.values():
        assert config.alpha == 1
        assert (config.batch.trajectories, config.batch.group_size) == (128, 8)
        assert config.tasks["math"].environment_settings == {"slow_s": 0.5}
        assert config.steps == configs[SYNC].steps
        assert config.eval_every == config.steps % config.checkpoint_every == 0
        first, past = config.tasks["math"].eval_prompts
        assert 1000 <= tables["eval_episodes"] <= past - first
    assert configs["rollart"].batch == BatchSettings(trajectories=128, group_size=8), "as shipped"
    plain = configs["plain"]
    assert (plain.batch.minimum, plain.batch.extra_members, plain.batch.replace_late) == (8, 0, False)
    assert plain.tasks["math"].stale_retries == 1_000_000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The committed work with two groups of two, one step, and a model that has learnt next to nothing."""
    folder = tmp_path_factory.mktemp("small") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold_start, "TRANSCRIPTS", dict.fromkeys(cold_start.TRANSCRIPTS, 4))
        cold_start.make_small_model(folder, steps=2)
    run = {
        "steps": 1,
        "checkpoint_every": 1,
        "batch": {"trajectories": 4, "group_size": 2},
        "tasks": {"math": {"environments": 8, "max_turns": 2, "environment_settings": {"slow_s": 0.01}}},
    }
    arms = {"plain": {"batch": {"min_group_size": 2}}}
    return {**merged(read_tables(WORK), {"eval_episodes": 4, "run": run, "arms": arms}), "model": str(folder)}


def test_kinds_are_evaluated_apart_and_without_latency(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from rich.console import Console

    rewards = {"+": 0.75, "-": 0.25}
    played: list[dict[str, Any]] = []

    async def recorded(config: RunConfig) -> j.EvalEnded:
        settings = config.tasks["math"].environment_settings
        played.append(settings)
        ended = await play(config)
        return j.EvalEnded(ended.at, ended.task, ended.step, ended.episodes, ended.scored, rewards[settings["signs"]])

    monkeypatch.setattr("rollart.bench.learn_run.play", recorded)
    figures = Bench(tiny, tmp_path, RuntimeKind.INLINE).measure([3])
    assert played == [{"slow_s": 0.0, "signs": "+"}, {"slow_s": 0.0, "signs": "-"}] * 4
    assert figures["finals"] == {arm: {"3": 0.5} for arm in ("sync", "rollart", "plain")}
    assert figures["kinds"]["slow"]["after"] == {"sync": 0.25, "rollart": 0.25, "plain": 0.25}
    assert figures["points_by_seed"] == {"rollart": {"3": 0.0}, "plain": {"3": 0.0}}
    assert set(figures["prompt_bias"]["rollart"]) >= {"duration_s", "turns"}
    show(Console(width=120), figures)
    assert "slow (25% before): sync 25.0%; rollart 25.0%, +0.0" in capsys.readouterr().out


def test_the_command_reads_the_work_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def recorded(file: str) -> dict[str, Any]:
        read.append(file)
        return {"seeds": []}

    monkeypatch.setattr("rollart.bench.learn.read_tables", recorded)
    for options in ([], ["--work", "latency"]):
        monkeypatch.setattr(sys, "argv", ["rollart", "bench", "learn", "--seeds", "1", *options])
        with pytest.raises(SystemExit):
            main()
    assert read == ["learn.toml", "learn_latency.toml"]
