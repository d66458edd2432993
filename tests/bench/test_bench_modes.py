"""`rollart bench modes`: its figures from journals that are written by hand, and all modes once, tiny and for real."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_work import LAKE, MODEL_CONFIG, RUN

from rollart.app.api import merged
from rollart.app.running import RuntimeKind
from rollart.bench.common import read_tables
from rollart.bench.modes import WITHOUT, WORK
from rollart.bench.modes_run import Figures, Measured, Steps, compared, figures_of, measure, with_latency
from rollart.bench.runs import dedicated_cores, window
from rollart.cli.main import main
from rollart.config.load import check
from rollart.config.modes import Mode
from rollart.config.schema import RunConfig
from rollart.types import journal as j
from rollart.types.errors import RequestError, RunError
from rollart.types.ids import ClaimId, GroupId, TrajectoryId, WorkerId
from rollart.types.messages import Role
from rollart.types.trajectory import GroupOutcome, Outcome
from rollart.types.versions import Version

V0 = Version(0, 0)


def step(number: int, at: float, *, stepping_s: float, recompute_s: float, training_s: float) -> list[j.JournalEvent]:
    """Ten seconds, with two trajectories that are trained and one that is not, of ten tokens each."""
    ids = [TrajectoryId(3 * number + member) for member in range(3)]
    trained, stale = GroupId(2 * number), GroupId(2 * number + 1)
    ends = [j.TrajectoryEnded(at - 2, id, Outcome.COMPLETED, 1, 10, 1.0) for id in ids[:2]]
    return [
        *[j.TurnEnded(at - 3, id, 1, WorkerId("engine/local/0.0"), 10, 5, 0, 0, ((V0, 10),)) for id in ids],
        *ends,
        j.TrajectoryEnded(at - 2, ids[2], Outcome.STALE, 1, 10, None),
        j.GroupEnded(at - 2, stale, GroupOutcome.STALE, ""),
        j.WeightsSynced(at - 1, V0, 0.5, 0.0),
        j.BatchClaimed(at - 1, ClaimId(number), number, V0, V0, (trained,), tuple(ids[:2]), (0,), (0,)),
        j.StepTrained(at, ClaimId(number), Version(0, number + 1), 0.5, {}),
        j.PoolTime(at, "local", {"busy": 9.0, "no_work": 1.0}, stepping_s, recompute_s),
        j.PoolTime(at, "trainer", {"busy": training_s, "no_work": 10.0 - training_s}),
        j.GroupEnded(at, trained, GroupOutcome.TRAINED, ""),
    ]


def test_figures_are_those_of_the_steps_that_count() -> None:
    outside = {"stepping_s": 99.0, "recompute_s": 99.0, "training_s": 99.0}
    events = [
        j.WorkerSpawned(0.0, WorkerId("engine/local/0.0"), Role.ENGINE, "local"),
        *step(0, 90.0, **outside),
        *step(1, 100.0, stepping_s=7.0, recompute_s=1.0, training_s=4.0),
        *step(2, 110.0, stepping_s=9.0, recompute_s=3.0, training_s=2.0),
        *step(3, 150.0, **outside),
    ]
    figures = figures_of(events, Steps(warm_up=1, counted=2, cool_down=1))
    assert figures == Figures(
        step_s=pytest.approx(10.0),
        trajectories_per_s=pytest.approx(4 / 20),
        generation_s=pytest.approx(6.0 * 2 / 3),  # a third of the tokens was not trained
        training_s=pytest.approx(3.0),
        engine_busy=pytest.approx(0.8),
        sync_share=pytest.approx(0.05),
        stale_share=pytest.approx(0.5),
        wasted=pytest.approx(1 / 3),
    )


def test_a_run_that_is_too_short_is_refused() -> None:
    events = step(0, 10.0, stepping_s=1.0, recompute_s=0.0, training_s=1.0)
    with pytest.raises(RunError, match="trained 1 steps; without the first 1 and the last 2 none is left"):
        window(events, 1, 2)


def figures(step_s: float, generation_s: float, training_s: float) -> Figures:
    return Figures(step_s, 256 / step_s, generation_s, training_s, 0.9, 0.01, 0.0, 0.0)


def measured(*rounds: Figures) -> Measured:
    made = Measured()
    made.rounds += rounds
    return made


def test_the_bound_is_the_slower_stage_at_its_best() -> None:
    rows = {row: measured(figures(20.0, 9.0, 9.0)) for row in ("sync", "one_off", "areal")}
    ours = measured(figures(9.0, 4.0, 3.5), figures(5.0, 4.0, 3.5), figures(2.0, 4.0, 3.5))
    result = compared(rows | {"sync_plus": measured(figures(12.0, 5.0, 3.0)), "rollart": ours})
    assert result["rollart_over_sync"] == pytest.approx(4.0)
    assert result["rollart_over_sync_plus"] == pytest.approx(2.4)
    assert result["bound"] == pytest.approx(12.0 / 4.0)
    assert result["of_bound"] == pytest.approx(0.8)
    assert list(result["modes"]) == ["sync", "one_off", "areal", "sync_plus", "rollart"]
    assert [256 / rate for rate in result["rates"]["rollart"]] == pytest.approx([9.0, 5.0, 2.0])


# --- for real -------------------------------------------------------------------------------------------------------


def test_the_committed_work_is_what_the_bench_says() -> None:
    tables = read_tables(WORK)
    assert {Mode(mode) for mode in tables["steps"]} == set(Mode)
    assert all(len(counts) == 3 and min(counts[:2]) > 0 for counts in tables["steps"].values())
    plain, late = (
        check(RunConfig, run | {"steps": 1, "model": tables["model"]}) for run in (tables["run"], with_latency(tables))
    )
    assert not plain.tasks["frozenlake"].inject
    (injection,) = late.tasks["frozenlake"].inject
    assert (injection.latency_ms, injection.sigma, injection.hang_share, injection.hang_s) == (50.0, 1.0, 0.01, 5.0)
    assert late.tasks["frozenlake"].step_deadline_s > 5.0
    assert (late.batch.extra_groups, late.batch.extra_members) == (0, None), "modes have their defaults"
    for changes in tables["variants"].values():
        check(RunConfig, merged(with_latency(tables), changes) | {"steps": 1, "model": tables["model"]})


def test_engine_and_trainer_have_a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 2}, raising=False)
    assert dedicated_cores() == {Role.ENGINE: [2], Role.TRAINER: [4], Role.ENVIRONMENT: [2, 4], Role.REWARD: [2, 4]}
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert dedicated_cores()[Role.ENVIRONMENT] == [2, 3]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    with pytest.raises(RequestError, match="two cores"):
        dedicated_cores()


WORK_OF_A_TEST: dict[str, Any] = {
    "model": {"config": MODEL_CONFIG},
    "steps": {mode.value: [1, 2, 1] for mode in Mode},
    "run": RUN | {"alpha": 1, "tasks": {"lake": LAKE}},
    "latency": {"latency_ms": 1.0},
    "variants": {"plain": {"batch": {"extra_members": 0}}},
}


def test_all_modes_for_real(tmp_path: Path) -> None:
    result = measure(WORK_OF_A_TEST, tmp_path, RuntimeKind.INLINE)
    assert set(result["modes"]) == {*(mode.value for mode in Mode), "plain"}
    assert result["bias"]["rollart"]["prompts"]["duration_s"]["count"] > 0
    for compared_with in (result, result[WITHOUT]):
        assert {mode.value for mode in Mode} <= set(compared_with["modes"])
        assert all(figures["trajectories_per_s"] > 0 for figures in compared_with["modes"].values())
        assert compared_with["rollart_over_sync"] > 0
        assert compared_with["of_bound"] > 0
        # Above 1 is possible: steps are so short that reports of earlier ones fall into them.
        assert compared_with["engine_busy"] >= 0
    assert (tmp_path / "rollart-0").is_dir()
    assert (tmp_path / f"rollart_{WITHOUT}-0").is_dir()


def test_some_rows_alone(tmp_path: Path) -> None:
    only = ["plain", f"rollart_{WITHOUT}", f"areal_{WITHOUT}"]
    result = measure(WORK_OF_A_TEST, tmp_path, RuntimeKind.INLINE, only=only)
    assert list(result["modes"]) == ["plain"]
    assert list(result[WITHOUT]["modes"]) == ["areal", "rollart"]
    assert result[WITHOUT]["rollart_over_areal"] > 0
    assert "bound" not in result[WITHOUT]


def test_a_row_that_is_misspelt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"there is no row 'plane'.*plain"):
        measure(WORK_OF_A_TEST, tmp_path, RuntimeKind.INLINE, only=["plane"])


@pytest.mark.parametrize("options", [["--json"], ["--rows", "plain,rollart"]])
def test_what_the_command_prints(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modes = {mode.value: measured(figures(10.0, 4.0, 3.0)) for mode in Mode}
    result = compared(modes) | {WITHOUT: compared(modes)}
    asked: list[list[str]] = []

    def measure(_tables: Any, _folder: Path, *, rounds: int | None, only: list[str]) -> dict[str, Any]:
        assert rounds is None
        asked.append(only)
        return result

    monkeypatch.setattr("rollart.bench.modes_run.measure", measure)
    monkeypatch.setattr(sys, "argv", ["rollart", "bench", "modes", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    printed = capsys.readouterr().out
    if "--json" in options:
        assert asked == [[]]
        assert json.loads(printed) == result
    else:
        assert asked == [["plain", "rollart"]]
        assert printed.count("rollart_over_sync_plus: 1.000") == 2
