"""`rollart bench loop`: its figures from journals that are written by hand, and every proof once, tiny and for real."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_work import LAKE, MODEL_CONFIG, RUN

from rollart.app.compose import worker_specs
from rollart.app.running import RuntimeKind
from rollart.bench.common import read_tables
from rollart.bench.loop import WORK, Part
from rollart.bench.loop_run import (
    Bench,
    assignment,
    bad_figures,
    busy_figures,
    failures,
    runtime_figures,
    trained_failures,
)
from rollart.bench.runs import throughput
from rollart.cli.main import main
from rollart.config.injection import Injection
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.types import journal as j
from rollart.types.errors import RunError
from rollart.types.failures import FailureKind
from rollart.types.ids import ClaimId, GroupId, PromptId, TrajectoryId, WorkerId
from rollart.types.messages import Role
from rollart.types.trajectory import GroupOutcome, Outcome, Prompt, Purpose
from rollart.types.versions import Version

HANGS, RAISES = Injection(bad_slots=(0,), hang_share=1.0), Injection(bad_slots=(1,), raise_every=3)
V0 = Version(0, 0)


def trajectory(
    id: int, slot: int, outcome: Outcome, turns: int = 5, failure: FailureKind | None = None
) -> list[j.JournalEvent]:
    reward = 0.0 if outcome in (Outcome.COMPLETED, Outcome.TRUNCATED) else None
    return [
        j.TrajectoryStarted(1.0, TrajectoryId(id), GroupId(0), id, 0, f"environment/lake/0.0#{slot}"),
        j.TrajectoryEnded(2.0, TrajectoryId(id), outcome, turns, 3, reward, failure=failure),
    ]


def step(number: int, at: float, trajectories: list[int], groups: list[int] | None = None) -> list[j.JournalEvent]:
    members = tuple(map(TrajectoryId, trajectories))
    owners = tuple(map(GroupId, groups or [0]))
    return [
        j.BatchClaimed(at - 1.0, ClaimId(number), number, V0, V0, owners, members, (0,), (0,)),
        j.StepTrained(at, ClaimId(number), Version(0, number + 1), 0.5, {}),
    ]


# --- two bad environments -------------------------------------------------------------------------------------------


def test_throughput_is_what_was_trained_after_the_first_step() -> None:
    returned = j.BatchClaimed(15.0, ClaimId(7), 1, V0, V0, (), (TrajectoryId(9),) * 50, (), ())
    events = [*step(0, 10.0, [1, 2, 3]), returned, *step(1, 14.0, [4, 5]), *step(2, 20.0, [6, 7])]
    assert throughput(events) == pytest.approx(4 / 10)
    with pytest.raises(RunError, match="trained 1 steps; without the first 1 and the last 0 none is left"):
        throughput(step(0, 10.0, [1]))


@pytest.mark.parametrize(
    ("slot", "outcome", "turns", "failed"),
    [
        (5, Outcome.COMPLETED, 9, 0),
        (5, Outcome.ENV_FAILED, 1, 1),
        (0, Outcome.COMPLETED, 0, 1),  # it hung, and somebody made a reward of 0 of that
        (1, Outcome.COMPLETED, 2, 0),
        (1, Outcome.TRUNCATED, 3, 1),
    ],
)
def test_a_trained_failure_is_found_by_its_end_or_by_where_it_ran(
    slot: int, outcome: Outcome, turns: int, failed: int
) -> None:
    lived = trajectory(1, slot, outcome, turns)
    assert trained_failures([*lived, *step(0, 5.0, [1])], [HANGS, RAISES]) == failed
    assert trained_failures([*lived, *trajectory(2, 5, Outcome.COMPLETED), *step(0, 5.0, [2])], [HANGS, RAISES]) == 0


def test_failures_by_cause() -> None:
    late = trajectory(1, 0, Outcome.ENV_FAILED, 0, FailureKind.DEADLINE)
    reported = trajectory(2, 1, Outcome.ENV_FAILED, 2, FailureKind.ERROR)
    others = [event for id in (3, 4) for event in trajectory(id, 5, (Outcome.COMPLETED, Outcome.STALE)[id - 3])]
    assert failures([*late, *reported, *others]) == {"env_failed: timed out": 1, "env_failed: reported": 1}


def test_the_share_is_that_of_the_environments_that_are_left() -> None:
    def run(seconds: float) -> list[j.JournalEvent]:
        lives = [event for id in (1, 2) for event in trajectory(id, 5, Outcome.COMPLETED)]
        return [*lives, *step(0, 10.0, [1]), *step(1, 10.0 + seconds, [2])]

    figures = bad_figures(run(3.0), run(4.0), [HANGS, RAISES], environments=8)
    assert figures["bad_over_clean"] == pytest.approx(0.75)
    assert figures["bad_over_share"] == pytest.approx(1.0)


# --- busy engines ---------------------------------------------------------------------------------------------------


def test_shares_of_the_time_in_which_groups_are_opened_after_the_first_step() -> None:
    def pools(at: float, stepping: float) -> list[j.JournalEvent]:
        return [
            j.PoolTime(at, "local", {"busy": 19.0, "tail": 1.0}, stepping, 0.5),
            j.PoolTime(at, "trainer", {"busy": 5.0, "rollout": 15.0}),
        ]

    def opened(group: int) -> j.JournalEvent:
        return j.GroupOpened(9.0, GroupId(group), "lake", PromptId("p"), Purpose.TRAIN, group, 0)

    start = [
        j.RunStarted(0.0, "run", "rollart", 1, 0, {"lake": 1}, 1),
        j.WorkerSpawned(0.0, WorkerId("engine/local/0.0"), Role.ENGINE, "local"),
    ]
    first, second, third, last = (step(number, 10.0 + 20.0 * number, [1])[1:] for number in range(4))
    figures = busy_figures(
        [
            *start,
            j.WeightsSynced(5.0, V0, 9.0, 0.0),
            *(first + pools(10.0, 1.0)),
            opened(1),
            j.WeightsSynced(11.0, V0, 0.4, 0.0),
            *(second + pools(30.0, 17.0)),
            j.WeightsSynced(31.0, V0, 0.4, 0.0),
            *(third + pools(50.0, 18.0)),
            opened(2),
            j.WeightsSynced(51.0, V0, 9.0, 0.0),
            *(last + pools(70.0, 0.0)),  # no group was opened after it: engines had nothing to do
            *pools(75.0, 0.0),
            j.RunEnded(80.0, 4),
        ]
    )
    assert figures["engine_busy"] == {"local": pytest.approx(35 / 40)}
    assert figures["engine_has_requests"] == {"local": pytest.approx(38 / 40)}
    assert figures["recompute_share"] == {"local": pytest.approx(1 / 40)}
    assert figures["sync_share"] == pytest.approx(0.8 / 40)
    assert figures["trainer_busy"] == pytest.approx(0.25)
    assert figures["step_s"] == pytest.approx(20.0)


# --- two runtimes ---------------------------------------------------------------------------------------------------


def synchronous(
    order: list[int], seeds: dict[int, int], members: tuple[int, int] = (0, 1), score: float = 0.5
) -> list[j.JournalEvent]:
    """One step of two groups of two, whose groups and trajectories are numbered in `order`."""
    events: list[j.JournalEvent] = [j.RunStarted(0.0, "run", "sync", 0, 3, {"lake": 2}, 2)]
    for group, ticket in enumerate(order):
        prompt = Prompt(PromptId(f"lake/{seeds[ticket]}"), "lake", seeds[ticket])
        events += [
            j.PromptTaken(1.0, ticket, prompt, {}),
            j.GroupOpened(1.0, GroupId(group), "lake", prompt.id, Purpose.TRAIN, ticket, 0),
        ]
        events += [
            j.TrajectoryStarted(1.0, TrajectoryId(2 * group + place), GroupId(group), member, 0, f"lake#{group}")
            for place, member in enumerate(members)
        ]
    events += step(0, 10.0, [3, 0, 1, 2], [1, 0])
    events.append(j.GroupEnded(10.0, GroupId(0), GroupOutcome.TRAINED, False))
    return [*events, j.EvalEnded(0.5, "lake", 0, 8, 8, 0.0), j.EvalEnded(11.0, "lake", 1, 8, 8, score)]


def test_who_is_trained_on_what_does_not_depend_on_who_ended_first() -> None:
    seeds = {0: 70, 1: 80}
    plain = synchronous([0, 1], seeds)
    assert assignment(plain) == assignment(synchronous([1, 0], seeds))
    assert assignment(plain) != assignment(synchronous([0, 1], {0: 70, 1: 81}))
    assert assignment(plain) != assignment(synchronous([0, 1], seeds, members=(0, 2)))
    ((first, second),) = assignment(plain)
    assert [member.prompt_seed for member in first + second] == [70, 70, 80, 80]
    assert len({member.seed for member in first + second}) == 4


def test_the_difference_is_between_the_last_evaluations() -> None:
    seeds = {0: 70, 1: 80}
    inline = {0: synchronous([0, 1], seeds, score=0.5), 1: synchronous([0, 1], seeds, score=0.25)}
    ray = {0: synchronous([1, 0], seeds, score=0.46), 1: synchronous([0, 1], seeds, score=0.27)}
    figures = runtime_figures(inline, ray)
    assert figures["same_assignment"] is True
    assert figures["held_out"] == {"inline": {"0": 0.5, "1": 0.25}, "ray": {"0": 0.46, "1": 0.27}}
    assert figures["mean_difference_points"] == pytest.approx(-1.0)
    assert figures["largest_difference_points"] == pytest.approx(4.0)
    ray[1] = synchronous([0, 1], {0: 70, 1: 81})
    assert runtime_figures(inline, ray)["same_assignment"] is False


# --- for real -------------------------------------------------------------------------------------------------------


def test_the_committed_work_is_what_the_proofs_need() -> None:
    tables = read_tables(WORK)
    configs = {part: check(RunConfig, tables[part.value]["run"] | {"model": tables["model"]}) for part in Part}
    bad = configs[Part.BAD].tasks["frozenlake"]
    broken = {slot for each in tables["bad"]["inject"] for slot in each["bad_slots"]}
    hosts = [spec for spec in worker_specs(configs[Part.BAD], None, None) if spec.role is Role.ENVIRONMENT]
    assert (bad.environments, len(broken), len(hosts)) == (32, 2, 1)  # slots are counted per host
    assert configs[Part.RUNTIMES].mode == "sync"
    assert len(tables["runtimes"]["seeds"]) == 3
    assert not any(config.algorithm.filter_zero_variance for config in configs.values())


TINY = RUN | {"steps": 2, "alpha": 0}
HURRIED = LAKE | {"reset_deadline_s": 1.0}
"""Where an environment hangs; on a busy machine others may be late, too."""
SYNC = {"mode": "sync", "eval_every": 2}
WORK_OF_A_TEST: dict[str, Any] = {
    "model": {"config": MODEL_CONFIG},
    "bad": {
        "inject": [{"bad_slots": [0], "hang_share": 1.0}, {"bad_slots": [1], "raise_every": 1}],
        "run": TINY | {"tasks": {"lake": HURRIED | {"inject": [{"latency_ms": 1.0}]}}},
    },
    "busy": {"run": TINY | {"steps": 5, "tasks": {"lake": LAKE}}},
    "runtimes": {"seeds": [0], "run": TINY | SYNC | {"tasks": {"lake": LAKE | {"eval_episodes": 8}}}},
}


def test_two_bad_environments_for_real(tmp_path: Path) -> None:
    figures = Bench(WORK_OF_A_TEST, tmp_path, RuntimeKind.INLINE).measure(Part.BAD)
    assert figures["trained_failures"] == 0
    assert figures["failures"]["env_failed: reported"] >= 1
    assert figures["bad_over_clean"] > 0


def test_both_runtimes_for_real(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
    figures = Bench(WORK_OF_A_TEST, tmp_path).measure(Part.RUNTIMES)
    assert figures["same_assignment"] is True
    assert all(0 <= score <= 1 for scores in figures["held_out"].values() for score in scores.values())


def test_json_is_all_there_is_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("rollart.bench.loop.read_tables", lambda _: WORK_OF_A_TEST)
    monkeypatch.setattr(Bench.__init__, "__defaults__", (RuntimeKind.INLINE,))
    for options in (["--json", "--out", str(tmp_path / "kept")], []):
        monkeypatch.setattr(sys, "argv", ["rollart", "bench", "loop", "--part", "busy", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        out = capsys.readouterr().out
        assert "engine_busy" in out
        if options:
            figures = json.loads(out)["busy"]
            assert 0 < figures["engine_has_requests"]["local"] <= 1
            assert (tmp_path / "kept" / "busy" / "journal.sqlite").is_file()
