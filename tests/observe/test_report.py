"""The report, figure by figure: a small journal written by hand, and what always adds up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.observe.report import Report, make_report
from rollart.types import journal as j
from rollart.types.failures import StopReason
from rollart.types.ids import ClaimId, GroupId, PromptId, TrajectoryId, WorkerId
from rollart.types.messages import Role
from rollart.types.trajectory import GroupOutcome, Outcome, Purpose
from rollart.types.versions import Version

V0, V1, V2 = (Version(0, step) for step in range(3))
H20_0, H20_1, H800 = WorkerId("engine/H20/0.0"), WorkerId("engine/H20/1.0"), WorkerId("engine/H800/0.0")


def opened(group: int, task: str = "maze", purpose: Purpose = Purpose.TRAIN) -> j.JournalEvent:
    return j.GroupOpened(11.0, GroupId(group), task, PromptId(str(group)), purpose, group, 0)


def started(trajectory: int, group: int, engine: WorkerId = H20_0, reason: str = "") -> list[j.JournalEvent]:
    hardware = engine.split("/")[1]
    return [
        j.TrajectoryStarted(11.0, TrajectoryId(trajectory), GroupId(group), 0, 0, "slot"),
        j.Placed(11.0, TrajectoryId(trajectory), engine, hardware, reason),
    ]


def turn(trajectory: int, sampled: int, prefilled: int = 10, recomputed: int = 0) -> j.JournalEvent:
    return j.TurnEnded(12.0, TrajectoryId(trajectory), 1, H20_0, sampled, prefilled, 0, recomputed, ((V0, sampled),))


def ended(
    trajectory: int, outcome: Outcome, sampled: int, reward: float | None = None, masked: bool = False
) -> j.JournalEvent:
    return j.TrajectoryEnded(13.0, TrajectoryId(trajectory), outcome, 1, sampled, reward, V0, V0, masked)


def group_ended(group: int, outcome: GroupOutcome) -> j.JournalEvent:
    return j.GroupEnded(14.0, GroupId(group), outcome, False)


def claimed(claim: int, groups: list[int], trajectories: list[int], *, masked: tuple[int, ...] = ()) -> j.JournalEvent:
    return j.BatchClaimed(
        15.0,
        ClaimId(claim),
        claim,
        V0,
        Version(0, claim),
        tuple(GroupId(group) for group in groups),
        tuple(TrajectoryId(trajectory) for trajectory in trajectories),
        staleness=tuple(index % 2 for index in range(len(groups))),
        lag=tuple(index % 2 + claim for index in range(len(groups))),
        masked=tuple(TrajectoryId(trajectory) for trajectory in masked),
    )


def trained(at: float, claim: int) -> j.JournalEvent:
    return j.StepTrained(at, ClaimId(claim), Version(0, claim + 1), 2.0, {})


SETUP: list[j.JournalEvent] = [
    j.RunStarted(5.0, "lake", "rollart", 1, 42, {"maze": 2, "math": 1}, 2),
    j.WorkerSpawned(5.0, H20_0, Role.ENGINE, "H20"),
    j.WorkerSpawned(5.0, H20_1, Role.ENGINE, "H20"),
    j.WorkerSpawned(5.0, H800, Role.ENGINE, "H800"),
    j.WorkerSpawned(5.0, WorkerId("environment/maze/0.0"), Role.ENVIRONMENT, "environments"),
    j.WorkerJoined(6.0, H20_0),
    j.EpochStarted(6.0, 0, 0),
    j.VersionPublished(10.0, V0, 100),
]

STORY: list[j.JournalEvent] = [
    *SETUP,
    # Group 1 and 2 are trained by claim 0, with one masked at the claim and one masked at its end.
    opened(1),
    opened(2),
    *started(1, 1),
    *started(2, 1, H800, "H20 overloaded"),
    *started(3, 2),
    *started(4, 2),
    turn(1, 30),
    turn(2, 50, prefilled=20, recomputed=7),
    turn(2, 20, prefilled=5, recomputed=1),
    turn(3, 11),
    turn(4, 13, recomputed=0),
    ended(1, Outcome.COMPLETED, 30, 1.0),
    ended(2, Outcome.TRUNCATED, 70, 0.0),
    ended(3, Outcome.COMPLETED, 11, 0.5, masked=True),
    ended(4, Outcome.COMPLETED, 13, 0.5),
    claimed(0, [1, 2], [1, 2, 3, 4], masked=(3, 4)),
    trained(20.0, 0),
    group_ended(1, GroupOutcome.TRAINED),
    group_ended(2, GroupOutcome.TRAINED),
    j.VersionPublished(20.5, V1, 100),
    j.WeightsSynced(21.0, V1, 1.0, 0.5),
    # Group 3, another task, is trained by claim 1; one of its members came too late for it.
    opened(3, "math"),
    *started(5, 3),
    *started(6, 3, H20_0, "H800 missing"),
    *started(7, 3, H20_0, "H800 missing"),
    turn(5, 17),
    ended(5, Outcome.COMPLETED, 17, 2.0),
    ended(6, Outcome.COMPLETED, 19, 4.0),
    ended(7, Outcome.COMPLETED, 100, 9.0),
    claimed(1, [3], [5, 6]),
    trained(24.0, 1),
    group_ended(3, GroupOutcome.TRAINED),
    j.WeightsSynced(25.0, V2, 2.0, 1.5),
    # What was for nothing: one of every kind.
    opened(4),
    *started(8, 4),
    *started(9, 4),
    ended(8, Outcome.COMPLETED, 23, 1.0),
    ended(9, Outcome.STALE, 29),
    group_ended(4, GroupOutcome.STALE),
    opened(5),
    *started(10, 5),
    *started(11, 5),
    *started(12, 5),
    ended(10, Outcome.ENV_FAILED, 31),
    ended(11, Outcome.ENGINE_FAILED, 0),
    ended(12, Outcome.REWARD_FAILED, 37),
    group_ended(5, GroupOutcome.FAILED),
    opened(6),
    *started(13, 6),
    ended(13, Outcome.COMPLETED, 41, 1.0),
    group_ended(6, GroupOutcome.FILTERED),
    opened(7),
    *started(14, 7),
    ended(14, Outcome.REDUNDANT, 43),
    *started(15, 7),
    ended(15, Outcome.COMPLETED, 47, 0.0),
    *started(16, 7),
    ended(16, Outcome.CANCELLED, 53),
    # Claim 2 came to nothing: its trajectory is in the buffer when the run ends.
    claimed(2, [7], [15]),
    j.ClaimReturned(26.0, ClaimId(2), "interrupted"),
    # Evaluation.
    opened(8, "maze", Purpose.EVAL),
    *started(17, 8),
    ended(17, Outcome.COMPLETED, 59, 1.0),
    group_ended(8, GroupOutcome.EVALUATED),
    j.EvalEnded(27.0, "maze", 2, 1, 1, 1.0),
    opened(9, "maze", Purpose.EVAL),
    *started(18, 9),
    ended(18, Outcome.ENV_FAILED, 61),
    group_ended(9, GroupOutcome.FAILED),
    # One that never ended.
    opened(10),
    *started(19, 10),
    turn(19, 67, recomputed=3),
    # Everything else.
    j.PoolTime(22.0, "H20", {"busy": 10.0, "tail": 2.0}),
    j.PoolTime(27.0, "H800", {"busy": 5.0}),
    j.PoolTime(27.0, "H20", {"busy": 4.0, "reward": 6.0}),
    j.PoolTime(27.0, "environments", {"busy": 8.0}),
    j.ShareRedistributed(22.0, 1, {"maze": 1}, {"math": 1}, "late"),
    j.WorkerDied(23.0, H20_1, "killed", "restarted"),
    j.WorkerSpawned(23.5, WorkerId("engine/H20/1.1"), Role.ENGINE, "H20"),
    j.StallReported(24.0, ("somebody",)),
    j.StallReported(25.0, ("somebody",)),
    j.RunEnded(30.0, 2),
]


@pytest.fixture(scope="module")
def report() -> Report:
    return make_report(STORY)


def test_filtered_groups_are_counted_by_their_reason() -> None:
    ends = [j.GroupEnded(14.0, GroupId(g), GroupOutcome.FILTERED, False, cause) for g, cause in enumerate("bab", 1)]
    report = make_report([*SETUP, *map(opened, (1, 2, 3, 4)), *ends, group_ended(4, GroupOutcome.STALE)])
    assert report.filtered == {"a": 1, "b": 2}
    assert list(report.filtered) == ["a", "b"]
    assert report.group_outcomes == {"filtered": 3, "stale": 1}


def test_the_run(report: Report) -> None:
    assert (report.name, report.mode, report.alpha, report.seed) == ("lake", "rollart", 1, 42)
    assert (report.steps, report.seconds, report.ended) == (2, 25.0, "done")
    assert (report.redistributed, report.workers_lost, report.stalls) == (1, 1, 2)
    assert report.engines == {"H20": 2, "H800": 1}, "places, not incarnations"


def test_time(report: Report) -> None:
    assert report.first_step_s == 10.0, "from the first version to the first step"
    assert report.step_s == 4.0
    assert report.trajectories_per_s == 6 / 14
    assert report.tokens_per_s == (30 + 70 + 11 + 13 + 17 + 19) / 14
    assert (report.suspended_s, report.exposed_s) == (1.5, 1.0)


def test_outcomes(report: Report) -> None:
    assert report.outcomes == {
        "cancelled": 1,
        "completed": 10,
        "engine_failed": 1,
        "env_failed": 2,
        "redundant": 1,
        "reward_failed": 1,
        "stale": 1,
        "truncated": 1,
    }
    assert sum(report.outcomes.values()) + report.open_trajectories == 19
    assert report.open_trajectories == 1
    assert report.group_outcomes == {"evaluated": 1, "failed": 2, "filtered": 1, "stale": 1, "trained": 3}


def test_tokens_are_under_one_heading_each(report: Report) -> None:
    assert report.trained_tokens == 30 + 70 + 17 + 19
    assert report.evaluation_tokens == 59 + 61
    assert report.wasted_tokens == {
        "masked": 11 + 13,
        "redundant": 43 + 100,  # stopped in time, or finished after its group was complete
        "stale": 29 + 23,
        "env_failed": 31,
        "reward_failed": 37,
        "filtered": 41,
        "open": 47,
        "cancelled": 53,
    }
    headings = report.trained_tokens + report.evaluation_tokens + sum(report.wasted_tokens.values())
    assert report.sampled_tokens == headings
    assert report.wasted_token_share == (24 + 143 + 52 + 31 + 37 + 41 + 47 + 53) / headings


def test_computation(report: Report) -> None:
    assert report.prefilled_tokens == 10 + 20 + 5 + 10 + 10 + 10 + 10
    assert report.recomputed_tokens == 7 + 1 + 3
    assert report.recomputed_trajectories == 1, "of those that ended"


def test_staleness_and_lag_of_claimed_groups(report: Report) -> None:
    assert report.staleness == {0: 3, 1: 1}
    assert report.lag == {0: 1, 1: 2, 2: 1}


def test_pools(report: Report) -> None:
    assert report.pools == {
        "H20": {"busy": 14.0, "reward": 6.0, "tail": 2.0},
        "H800": {"busy": 5.0},
        "environments": {"busy": 8.0},
    }
    assert list(report.pools["H20"]) == ["busy", "reward", "tail"]
    assert report.engine_seconds_per_step() == {"busy": 19.0 / 6, "reward": 1.0, "tail": 2.0 / 6}


def test_placements(report: Report) -> None:
    assert report.placements == {"math": {"H20": 1}, "maze": {"H20": 4, "H800": 2}}
    assert report.fallbacks == {"H20 overloaded": 1, "H800 missing": 2}


def test_rewards(report: Report) -> None:
    assert report.kept_reward == {"math": 3.0, "maze": 0.5}
    assert report.reward == {"math": (2.0 + 4.0 + 9.0) / 3, "maze": (1.0 + 0.5 + 0.5 + 1.0 + 1.0) / 7}


def test_evaluations(report: Report) -> None:
    assert report.evaluations == [j.EvalEnded(27.0, "maze", 2, 1, 1, 1.0)]


# --- corners --------------------------------------------------------------------------------------------------------


def test_an_empty_journal_is_a_report_of_nothing() -> None:
    report = make_report([])
    assert report == Report()
    assert report.wasted_token_share == 0.0
    assert report.engine_seconds_per_step() == {}


def test_two_reports_share_nothing() -> None:
    make_report(STORY)
    assert make_report([]) == Report()
    assert Report().evaluations == []


def test_with_one_step_the_first_is_the_mean() -> None:
    report = make_report([*SETUP, claimed(0, [], []), trained(17.0, 0), j.RunEnded(20.0, 1)])
    assert report.first_step_s == report.step_s == 7.0


def test_the_mean_step_leaves_out_the_first() -> None:
    steps = [trained(at, number) for number, at in enumerate([30.0, 32.0, 36.0, 45.0])]
    report = make_report([*SETUP, *steps])
    assert (report.first_step_s, report.step_s) == (20.0, 5.0)
    assert report.trajectories_per_s == 0.0


def test_a_run_that_was_stopped_says_why() -> None:
    report = make_report([*SETUP, j.RunEnded(9.0, 0, "NoEngine: all gone", StopReason.NO_ENGINE)])
    assert (report.ended, report.seconds, report.step_s) == ("NoEngine: all gone", 4.0, 0.0)
    assert report.stop is StopReason.NO_ENGINE
    resumed = j.RunResumed(0.0, "rollart", 1)
    assert make_report([*SETUP, j.RunEnded(9.0, 0, "x", StopReason.FAILED), resumed]).stop is None


def test_a_later_version_does_not_restart_the_clock() -> None:
    events = [*SETUP, j.VersionPublished(12.0, V1, 1), trained(20.0, 0)]
    assert make_report(events).first_step_s == 10.0


# --- any journal ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(Purpose),
            st.sampled_from([*GroupOutcome, None]),
            st.lists(
                st.tuples(
                    st.sampled_from([*Outcome, None]),
                    st.integers(0, 9),
                    st.sampled_from(["claimed", "masked", "late", "returned"]),
                ),
                max_size=4,
            ),
        ),
        max_size=6,
    )
)
def test_every_trajectory_has_one_outcome_and_every_token_one_heading(
    groups: list[tuple[Purpose, GroupOutcome | None, list[tuple[Outcome | None, int, str]]]],
) -> None:
    events: list[j.JournalEvent] = []
    claims: dict[str, list[int]] = {"claimed": [], "masked": [], "late": [], "returned": []}
    sampled_in_all = count = 0
    for number, (purpose, group_outcome, members) in enumerate(groups):
        events.append(opened(number, purpose=purpose))
        for outcome, sampled, fate in members:
            events += started(count, number)
            if outcome is not None:
                sampled_in_all += sampled
                events.append(ended(count, outcome, sampled, 1.0 if outcome is Outcome.COMPLETED else None))
                if purpose is Purpose.TRAIN and outcome in (Outcome.COMPLETED, Outcome.TRUNCATED):
                    claims[fate].append(count)
            count += 1
        if group_outcome is not None:
            events.append(group_ended(number, group_outcome))
    events.append(claimed(0, [0], claims["claimed"] + claims["masked"], masked=tuple(claims["masked"])))
    events.append(trained(20.0, 0))
    events.append(claimed(1, [0], claims["returned"]))
    report = make_report(events)
    assert sum(report.outcomes.values()) + report.open_trajectories == count
    assert report.sampled_tokens == sampled_in_all
    headings = report.trained_tokens + report.evaluation_tokens + sum(report.wasted_tokens.values())
    assert headings == sampled_in_all
    assert "trained" not in report.wasted_tokens
    assert 0 not in report.wasted_tokens.values()
    assert 0.0 <= report.wasted_token_share <= 1.0
