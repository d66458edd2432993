"""`rollart bench affinity`: its figures from journals that are written by hand, and its work once, tiny, for real."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_work import LAKE, MODEL_CONFIG, RUN

from rollart.app.running import RuntimeKind
from rollart.bench.affinity import WORK
from rollart.bench.affinity_run import Moves, compared, measure, measure_paper, moves_of
from rollart.bench.affinity_tasks import Lengths
from rollart.bench.common import read_tables
from rollart.cli.main import main
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.sim.scenario import load_scenario
from rollart.types import journal as j
from rollart.types.affinity import AffinityCause, AffinityFigures
from rollart.types.ids import ClaimId, PromptId
from rollart.types.trajectory import Prompt
from rollart.types.versions import Version

RIGHT = {"read": "reader", "write": "writer"}
WRONG = {"read": "writer", "write": "reader"}


def changed(at: float, before: dict[str, str], after: dict[str, str]) -> j.AffinityChanged:
    why = {task: "because" for task in after if after[task] != before.get(task)}
    figures = AffinityFigures((), ())
    return j.AffinityChanged(at, AffinityCause.GAIN, after, before, why, figures, 1.0, 2.0, at)


def step(number: int) -> j.StepTrained:
    return j.StepTrained(float(number), ClaimId(number), Version(0, number), 1.0, {})


def test_moves_are_counted_by_the_steps_before_them() -> None:
    events = [
        changed(0.5, {}, WRONG),
        step(1),
        changed(1.5, WRONG, RIGHT),
        step(2),
        step(3),
        changed(3.5, RIGHT, WRONG),
    ]
    assert moves_of(events, [RIGHT], 2) == Moves(1, 2, WRONG)
    assert moves_of(events, [RIGHT], 4).later == 0
    assert moves_of(events[:2], [RIGHT], 2).assigned_by_step is None


def test_what_is_found_is_compared_with_the_best_of_both_kinds() -> None:
    rates = {"auto": [8.0, 10.0, 9.0], "good_a": [9.0], "good_b": [10.0], "bad_a": [5.0], "bad_b": [6.0]}
    result = compared(rates, ["good_a", "good_b"], ["bad_a", "bad_b"], [Moves(3, 0, RIGHT), Moves(7, 2, RIGHT)])
    assert result["over_best_fixed"] == pytest.approx(0.9)
    assert result["over_wrong"] == pytest.approx(1.5)
    assert (result["assigned_by_step"], result["moves_after_20_steps"]) == (7, 2)
    never = compared(rates, ["good_a"], ["bad_a"], [Moves(3, 0, RIGHT), Moves(None, 0, WRONG)])
    assert never["assigned_by_step"] is None


def test_the_committed_work_is_what_the_bench_says() -> None:
    tables = read_tables(WORK)
    run = check(RunConfig, tables["run"] | {"steps": 1, "model": tables["model"]})
    assert list(run.automatic_tasks()) == ["read", "write", "both"]
    assert run.pools["reader"].inject[0].decode > 1 == run.pools["reader"].inject[0].prefill
    assert run.pools["writer"].inject[0].prefill > 1 == run.pools["writer"].inject[0].decode
    for kind in ("good", "bad"):
        for row in tables[kind].values():
            assert set(row["tasks"]) == set(run.tasks)
    assert tables["steps"]["long"] - tables["steps"]["warm_up"] >= 200
    for assignments in tables["paper"]["rows"].values():
        load_scenario("paper", [*tables["paper"]["set"], *assignments])


def test_a_task_shows_as_much_text_as_it_is_told_to() -> None:
    task = Lengths(prompt=30, observation=20, turns=2)
    prompt = Prompt(id=PromptId("1"), task="read", seed=1)
    assert len(task.reset(prompt).observation) == 30
    first, last = task.step("a"), task.step("b")
    assert (len(first.observation), first.done, len(last.observation), last.done) == (20, False, 20, True)
    again = Lengths(prompt=30, observation=20, turns=2)
    assert again.reset(prompt) != again.step("a")
    task.close()


def test_all_rows_for_real(tmp_path: Path) -> None:
    lake = LAKE | {"environments": 8}
    tables: dict[str, Any] = {
        "model": {"config": MODEL_CONFIG},
        "steps": {"warm_up": 1, "counted": 1, "cool_down": 1, "long": 4},
        "run": RUN
        | {
            "alpha": 1,
            "tasks": {"read": lake, "write": lake},
            "pools": {"reader": {"inject": {"decode": 2.0}}, "writer": {"inject": {"prefill": 2.0}}},
        },
        "good": {"only": {"tasks": {task: {"hardware": name} for task, name in RIGHT.items()}}},
        "bad": {"only": {"tasks": {task: {"hardware": name} for task, name in WRONG.items()}}},
        "change": {"after_s": 0.5, "steps": 3},
    }
    result = measure(tables, tmp_path, RuntimeKind.INLINE)
    assert set(result["medians"]) == {"auto", "good_only", "bad_only"}
    assert all(rate > 0 for rate in result["medians"].values())
    assert result["over_best_fixed"] > 0
    assert set(result["change"]) == {"before", "after", "noticed", "after_steps", "steps_after_change"}


def test_the_paper_in_virtual_time() -> None:
    small = ["steps=1", "batch.trajectories=64", "batch.group_size=1", "pools.H800.engines=2", "pools.H20.engines=1"]
    auto = [f"tasks.{task}.hardware=auto" for task in ("swe", "webshop", "frozenlake", "math", "game")]
    rows = {"declared": [], "auto": auto, "H800_only": ["tasks.math.hardware=H800"], "H20_only": ["alpha=0"]}
    result = measure_paper({"seeds": [0], "set": small, "rows": rows})
    assert result["over_declared"] == pytest.approx(
        result["trajectories_per_s"]["auto"] / result["trajectories_per_s"]["declared"]
    )
    assert set(result["why"]) == {"swe", "webshop", "frozenlake", "math", "game"}


@pytest.mark.parametrize("options", [["--json"], []])
def test_what_the_command_prints(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"over_declared": 0.99, "why": {"swe": "swe → H800: the only class with engines that is measured"}}
    monkeypatch.setattr("rollart.bench.affinity_run.measure_paper", lambda _tables: result)
    monkeypatch.setattr(sys, "argv", ["rollart", "bench", "affinity", "--sim", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    printed = capsys.readouterr().out
    if options:
        assert json.loads(printed) == result
    else:
        assert "over_declared: 0.990\n" in printed
        assert "  swe: swe → H800" in printed
