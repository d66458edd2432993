"""`rollart bench learn`: its figures from journals and curves that are written by hand, and a tiny bench for real."""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rollart.app import cold_start
from rollart.app.api import merged
from rollart.app.evaluation import play
from rollart.app.running import RuntimeKind
from rollart.bench.common import read_tables
from rollart.bench.learn import Work
from rollart.bench.learn_picture import learn_svg, ticks
from rollart.bench.learn_run import (
    SYNC,
    T_975,
    Bench,
    Learnt,
    Point,
    Success,
    curve_of,
    interval,
    learn_figures,
    stale_share,
    time_to_reach,
)
from rollart.cli.main import main
from rollart.config.injection import Injection
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.types import journal as j
from rollart.types.ids import ClaimId, GroupId, PromptId, TrajectoryId
from rollart.types.trajectory import GroupOutcome, Purpose
from rollart.types.versions import Version

V0 = Version(0, 0)
SVG = "{http://www.w3.org/2000/svg}"


# --- from journals --------------------------------------------------------------------------------------------------


def step(number: int, at: float, claim: int, trajectories: int = 3) -> list[j.JournalEvent]:
    members = (TrajectoryId(1),) * trajectories
    return [
        j.BatchClaimed(at - 1.0, ClaimId(claim), number, V0, V0, (GroupId(0),), members, (0,), (0,)),
        j.StepTrained(at, ClaimId(claim), Version(0, number + 1), 0.5, {}),
    ]


def test_the_time_of_a_step_is_from_the_first_group_to_its_end() -> None:
    opened = [j.GroupOpened(at, GroupId(0), "lake", PromptId("p"), Purpose.TRAIN, 0, 0) for at in (7.0, 9.0)]
    events = [j.RunStarted(0.0, "run", "sync", 0, 0, {"lake": 1}, 1), *opened, *step(0, 10.0, 0), *step(1, 17.0, 1, 4)]
    assert curve_of(events, {2: Success(0.75), 0: Success(0.25)}) == [Point(0, 0, 0.0, 0.25), Point(2, 7, 10.0, 0.75)]


def test_a_step_that_was_trained_again_counts_once_and_when_it_was_last() -> None:
    opened = j.GroupOpened(0.0, GroupId(0), "lake", PromptId("p"), Purpose.TRAIN, 0, 0)
    events = [opened, *step(0, 10.0, 0), *step(1, 20.0, 1), *step(1, 30.0, 2)]
    assert curve_of(events, {2: Success(0.5)}) == [Point(2, 6, 30.0, 0.5)]


def test_stale_groups_are_a_share_of_what_might_have_been_trained() -> None:
    outcomes = [GroupOutcome.TRAINED] * 3 + [GroupOutcome.STALE] + [GroupOutcome.CANCELLED] * 5
    assert stale_share([j.GroupEnded(1.0, GroupId(0), outcome, False) for outcome in outcomes]) == 0.25


# --- figures --------------------------------------------------------------------------------------------------------


def test_an_interval_is_that_of_student() -> None:
    values = [1.0, -2.0, 3.0, 0.0, 3.0]  # standard deviation √4.5, divided by √5
    mean, low, high, worst = interval(values)
    assert mean == pytest.approx(1.0)
    assert worst == -2.0
    assert (low, high) == (pytest.approx(1 - 2.776 * 0.9**0.5), pytest.approx(1 + 2.776 * 0.9**0.5))
    assert interval([4.0]) == (4.0, None, None, 4.0)


def curve(seconds_per_step: float, *success: float) -> Learnt:
    points = [Point(2 * n, 128 * n, 2 * n * seconds_per_step, each) for n, each in enumerate(success)]
    return Learnt(points, 0.25)


def test_arms_are_compared_by_seed_at_the_last_step_of_sync_and_over_all() -> None:
    figures = learn_figures(
        {
            SYNC: {0: curve(10.0, 0.2, 0.4, 0.6), 1: curve(10.0, 0.3, 0.5, 0.8)},
            "alpha1": {0: curve(1.0, 0.2, 0.5, 0.62, 0.9), 1: curve(1.0, 0.3, 0.4, 0.78, 0.9)},
        }
    )
    final = interval([2.0, -2.0])
    assert figures["points_alpha1"] == pytest.approx({"mean": 0.0, "low": final.low, "high": final.high, "worst": -2.0})
    assert figures["curve_points_alpha1"]["mean"] == pytest.approx(0.0)
    assert figures["curve_points_alpha1"]["high"] == pytest.approx(interval([6.0, -6.0]).high)
    assert figures["success"] == {
        "sync": pytest.approx({"before": 0.25, "after": 0.7}),
        "alpha1": pytest.approx({"before": 0.25, "after": 0.7}),
    }
    assert figures["seconds"] == {"sync": 40.0, "alpha1": 4.0}
    assert figures["stale_share"] == {"sync": 0.25, "alpha1": 0.25}
    assert figures["time_ratio_alpha1"] == pytest.approx(4.0 / 40.0)
    assert figures["arms"]["alpha1"]["1"][3] == {
        "step": 6,
        "trajectories": 384,
        "seconds": 6.0,
        "success": 0.9,
        "kinds": {},
    }
    assert figures["finals"] == {"sync": {"0": 0.6, "1": 0.8}, "alpha1": {"0": 0.62, "1": 0.78}}
    assert figures["points_by_seed"] == {"alpha1": pytest.approx({"0": 2.0, "1": -2.0})}


def test_kinds_are_compared_apart_at_the_last_step_of_sync() -> None:
    def by_kind(*success: tuple[float, float]) -> Learnt:
        points = [
            Point(2 * n, 128 * n, 2.0 * n, (quick + slow) / 2, {"quick": quick, "slow": slow})
            for n, (quick, slow) in enumerate(success)
        ]
        return Learnt(points, 0.0, {"reward": 0.1})

    figures = learn_figures(
        {
            SYNC: {0: by_kind((0.2, 0.4), (0.8, 0.8)), 1: by_kind((0.2, 0.6), (0.8, 0.9))},
            "rollart": {0: by_kind((0.2, 0.4), (0.9, 0.7), (1.0, 1.0)), 1: by_kind((0.2, 0.6), (0.9, 0.8), (1.0, 1.0))},
        }
    )
    slow = figures["kinds"]["slow"]
    assert slow["before"] == pytest.approx(0.5)
    assert slow["after"] == pytest.approx({"sync": 0.85, "rollart": 0.75})
    assert slow["finals"]["rollart"] == {"0": 0.7, "1": 0.8}
    assert slow["points_rollart"] == pytest.approx({"mean": -10.0, "low": -10.0, "high": -10.0, "worst": -10.0})
    assert figures["kinds"]["quick"]["points_rollart"]["mean"] == pytest.approx(10.0)
    assert figures["points_rollart"]["mean"] == pytest.approx(0.0)
    assert figures["prompt_bias"]["rollart"] == pytest.approx({"reward": 0.1})


def test_the_time_is_that_of_the_mean_curve_between_two_of_its_points() -> None:
    sync = {0: curve(10.0, 0.2, 0.5, 0.6)}
    assert learn_figures({SYNC: sync, "alpha2": {0: curve(1.0, 0.2, 0.4, 0.8)}})["time_ratio_alpha2"] == pytest.approx(
        3.0 / 40.0
    )
    assert learn_figures({SYNC: sync, "alpha2": {0: curve(1.0, 0.2, 0.4, 0.5)}})["time_ratio_alpha2"] is None


def test_what_is_reached_and_lost_again_was_reached() -> None:
    points = curve(1.0, 0.2, 0.6, 0.4, 0.7).curve
    assert time_to_reach(points, 0.5) == pytest.approx(1.5)
    assert time_to_reach(points, 0.2) == 0.0
    assert time_to_reach(points, 0.71) is None


# --- the picture ----------------------------------------------------------------------------------------------------


def arms_of(**seeds: Learnt) -> dict[str, Any]:
    return {arm: {"0": [point._asdict() for point in learnt.curve]} for arm, learnt in seeds.items()}


def numbers(places: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (place.split(",") for place in places.split())]


def test_the_picture_has_a_line_and_a_band_per_arm_and_panel() -> None:
    arms = arms_of(sync=curve(10.0, 0.2, 0.4), alpha1=curve(1.0, 0.2, 0.5))
    for arm in arms.values():
        arm["1"] = [{**point, "success": point["success"] + 0.1} for point in arm["0"]]
    svg = ElementTree.fromstring(learn_svg(arms))
    lines = [numbers(each.attrib["points"]) for each in svg.iter(f"{SVG}polyline")]
    bands = [numbers(each.attrib["points"]) for each in svg.iter(f"{SVG}polygon")]
    assert (len(lines), len(bands)) == (4, 4)
    sync, rollart, sync_in_time, rollart_in_time = lines
    assert sync[-1][0] == rollart[-1][0], "as many trajectories"
    assert rollart_in_time[-1][0] - rollart_in_time[0][0] < 0.2 * (sync_in_time[-1][0] - sync_in_time[0][0])
    assert rollart[-1][1] < sync[-1][1], "higher"
    for line, band in zip(lines, bands, strict=True):
        for (x, y), high, low in zip(line, band, reversed(band), strict=False):
            assert (high[0], low[0]) == (x, x)
            assert high[1] < y < low[1]
    texts = {each.text for each in svg.iter(f"{SVG}text")}
    assert {"sync", "rollart, α = 1", "trained trajectories", "minutes", "100 %"} <= texts


def test_one_seed_has_no_band() -> None:
    svg = ElementTree.fromstring(learn_svg(arms_of(sync=curve(10.0, 0.2, 0.4))))
    (line, _), (band, _) = svg.iter(f"{SVG}polyline"), svg.iter(f"{SVG}polygon")
    assert set(numbers(band.attrib["points"])) == set(numbers(line.attrib["points"]))


@pytest.mark.parametrize("longest", [0.03, 0.9, 1.0, 7.99, 8.0, 59.0, 1536.0, 2304.0, 10_000.0])
def test_ticks_are_few_and_within(longest: float) -> None:
    found = ticks(longest)
    assert 4 <= len(found) <= 9
    assert found[0] == 0
    assert found[-1] <= longest


# --- for real -------------------------------------------------------------------------------------------------------


def test_the_committed_work_is_what_the_command_says() -> None:
    tables = read_tables(Work.HANGS.file)
    configs = {
        arm: check(RunConfig, {**tables["run"], **changes, "model": tables["model"]})
        for arm, changes in tables["arms"].items()
    }
    assert {arm: (config.mode.value, config.alpha) for arm, config in configs.items() if arm != SYNC} == {
        "alpha1": ("rollart", 1),
        "alpha2": ("rollart", 2),
    }
    assert configs[SYNC].mode == "sync"
    assert len(set(tables["seeds"])) == 5 <= len(T_975) + 1
    for config in configs.values():
        task = config.tasks["math"]
        assert task.inject == (Injection(latency_ms=50.0, sigma=1.0, hang_share=0.01, hang_s=5.0),)
        assert min(task.reset_deadline_s, task.step_deadline_s) >= 30.0
        assert (config.batch.trajectories, config.batch.group_size) == (64, 8)
        assert (config.batch.extra_groups, config.batch.extra_members) == (0, None)
        assert config.steps % config.checkpoint_every == 0 == configs[SYNC].steps % config.checkpoint_every
        assert config.steps >= configs[SYNC].steps
        assert config.keep_checkpoints * config.checkpoint_every >= config.steps
        assert config.eval_every == 0, "evaluation would be in the time of the run"
        first, past = task.eval_prompts
        assert tables["eval_episodes"] <= past - first


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The committed work, with two groups of two, two short arms, and a model that has learnt next to nothing."""
    folder = tmp_path_factory.mktemp("small") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold_start, "TRANSCRIPTS", dict.fromkeys(cold_start.TRANSCRIPTS, 4))
        cold_start.make_small_model(folder, steps=2)
    task = {
        "environments": 8,
        "max_turns": 3,
        "inject": {"latency_ms": 1.0, "hang_share": 0.2, "hang_s": 0.2},
    }
    run = {
        "steps": 2,
        "checkpoint_every": 1,
        "batch": {"trajectories": 4, "group_size": 2},
        "tasks": {"math": task},
    }
    work = merged(read_tables(Work.HANGS.file), {"eval_episodes": 6, "run": run})
    arms = {"sync": {"mode": "sync"}, "alpha1": {"mode": "rollart", "alpha": 1, "steps": 3}}
    return {**work, "model": str(folder), "arms": arms, "seeds": [0, 1]}


def test_arms_begin_alike_and_every_checkpoint_is_played(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played: list[RunConfig] = []

    async def recorded(config: RunConfig) -> j.EvalEnded:
        played.append(config)
        return await play(config)

    monkeypatch.setattr("rollart.bench.learn_run.play", recorded)
    figures = Bench(tiny, tmp_path, RuntimeKind.INLINE).measure([3])
    assert len({config.model for config in played}) == len(played) == 1 + 2 + 3
    assert {(config.mode, config.seed, config.tasks["math"].inject) for config in played} == {("rollart", 3, ())}
    sync, alpha1 = figures["arms"]["sync"]["3"], figures["arms"]["alpha1"]["3"]
    assert [point["step"] for point in sync] == [0, 1, 2]
    assert [point["trajectories"] for point in alpha1] == [0, 4, 8, 12]
    assert sync[0] == alpha1[0]
    assert [point["seconds"] for point in alpha1] == sorted(point["seconds"] for point in alpha1)
    assert all(0 <= point["success"] <= 1 for point in sync + alpha1)
    assert figures["points_alpha1"]["low"] is None
    configs = [json.loads((tmp_path / "seed-3" / arm / "config.json").read_text()) for arm in ("sync", "alpha1")]
    assert [(config["mode"], config["seed"]) for config in configs] == [("sync", 3), ("rollart", 3)]


def test_the_command(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def rollart(*options: object) -> object:
        monkeypatch.setattr(sys, "argv", ["rollart", "bench", "learn", *map(str, options)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    monkeypatch.setattr("rollart.bench.learn.read_tables", lambda _: tiny)
    monkeypatch.setattr(Bench.__init__, "__defaults__", (RuntimeKind.INLINE,))
    picture = tmp_path / "learn.svg"
    assert not rollart("--seeds", 1, "--picture", picture, "--out", tmp_path / "kept", "--json")
    figures = json.loads(capsys.readouterr().out)
    assert set(figures["arms"]["sync"]) == {"0"}
    assert {"points_alpha1", "curve_points_alpha1", "time_ratio_alpha1", "stale_share"} <= set(figures)
    assert "1 seed<" in picture.read_text(encoding="utf-8")
    assert (tmp_path / "kept" / "seed-0" / "alpha1" / "journal.sqlite").is_file()
    assert rollart("--seeds", 3) == 2
    assert "there are only 2" in capsys.readouterr().err
    assert rollart("--picture", tmp_path) == 2


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from rollart.bench.learn import show

    arms = {SYNC: {0: curve(10.0, 0.2, 0.6), 1: curve(10.0, 0.2, 0.6)}}
    arms["alpha1"] = {0: curve(1.0, 0.2, 0.7), 1: curve(1.0, 0.2, 0.72)}
    arms["alpha2"] = {0: curve(1.0, 0.2, 0.3), 1: curve(1.0, 0.2, 0.3)}
    show(Console(width=120), learn_figures(arms))
    out = capsys.readouterr().out
    assert "20% → 71%" in out
    assert "+11.0 (-1.7 to +23.7)" in out
    assert "not reached" in out
