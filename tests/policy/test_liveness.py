"""The bound of a step as a specification: first with numbers worked out by hand, then held against what it bounds."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.config.modes import MODES, Mode
from rollart.config.pools import PoolSettings
from rollart.config.schema import BatchSettings, Deadlines, RunConfig
from rollart.config.tasks import TaskSettings
from rollart.policy.groups import GroupBook
from rollart.policy.liveness import (
    EVAL_ATTEMPTS,
    episode_bound_s,
    eval_concurrency,
    shares_bound_s,
    step_bound_s,
    sync_bound_s,
)
from rollart.policy.shares import Redistributed, ShareBook, ShareRule, Unfillable
from rollart.policy.staleness import StalenessBound
from rollart.types.ids import GroupId, PromptId, TrajectoryId
from rollart.types.trajectory import Outcome, Prompt, Purpose, Ticket

DEADLINES = Deadlines(
    turn_s=10.0,
    model_loads_s=5.0,
    stage_s=3.0,
    update_s=2.0,
    train_s=100.0,
    publish_s=7.0,
    save_s=20.0,
    reward_s=1.0,
)
MAZE = TaskSettings(
    reset_deadline_s=4.0, step_deadline_s=2.0, share_deadline_s=60.0, max_turns=3, environments=8, eval_episodes=5
)
MATH = TaskSettings(
    reset_deadline_s=1.0, step_deadline_s=1.0, share_deadline_s=50.0, max_turns=1, environments=2, eval_episodes=2
)


def run(
    mode: Mode = Mode.ONE_OFF,
    deadlines: Deadlines = DEADLINES,
    *,
    checkpoint_every: int = 1,
    eval_every: int = 1,
    **tasks: TaskSettings,
) -> RunConfig:
    tasks = tasks or {"maze": MAZE, "math": MATH}
    return RunConfig(
        mode=mode,
        deadlines=deadlines,
        checkpoint_every=checkpoint_every,
        eval_every=eval_every,
        batch=BatchSettings(trajectories=2 * len(tasks), group_size=1),
        tasks=tasks,
        pools={"local": PoolSettings()},
    )


# --- by hand --------------------------------------------------------------------------------------------------------


def test_an_episode_resets_takes_its_turns_and_is_scored_with_every_retry() -> None:
    # 4 + 3 · (10 + 2) + 5 · (1 + 30), and 1 + 1 · (10 + 1) + 5 · (1 + 30)
    assert episode_bound_s(run(), "maze") == 195.0
    assert episode_bound_s(run(), "math") == 167.0


def test_an_engine_that_is_late_is_replaced_once() -> None:
    assert sync_bound_s(run()) == 2 * (3.0 + 2.0 + 5.0)


def test_every_task_may_take_the_time_of_the_slowest_one() -> None:
    assert shares_bound_s(run()) == 60.0 + 60.0
    assert shares_bound_s(run(maze=MAZE)) == 60.0


def test_held_out_episodes_beside_training_take_a_quarter_of_the_environments_and_at_least_one() -> None:
    environments = {"one": 1, "three": 3, "seven": 7, "eight": 8, "hundred": 100}
    config = run(**{name: TaskSettings(environments=count) for name, count in environments.items()})
    assert [eval_concurrency(config, name, alone=False) for name in environments] == [1, 1, 1, 2, 25]
    assert {name: eval_concurrency(config, name, alone=True) for name in environments} == environments


def test_a_step_takes_the_sum_of_what_it_waits_for() -> None:
    # Held-out episodes: maze has 5, two at once, so 3 rounds of 5 · 195 s; math ends before.
    evaluation_s = 3 * 5 * 195.0
    assert step_bound_s(run()) == 7.0 + 20.0 + evaluation_s + 120.0 + 2 * 20.0 + 100.0


def test_the_slowest_evaluation_counts_not_the_longest_episode() -> None:
    many = MATH.model_copy(update={"eval_episodes": 20})
    # math has 20, one at once: 20 rounds of 5 · 167 s.
    longer_s = 20 * 5 * 167.0 - 3 * 5 * 195.0
    assert step_bound_s(run(maze=MAZE, math=many)) == step_bound_s(run()) + longer_s


# --- what counts when -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
def test_evaluation_holds_every_step_up_where_rollout_drains_and_else_the_first(mode: Mode) -> None:
    with_it, without = step_bound_s(run(mode)), step_bound_s(run(mode, eval_every=0))
    rounds = 1 if MODES[mode].interrupt else 3
    assert with_it - without == rounds * 5 * 195.0


def test_a_task_without_held_out_episodes_is_not_waited_for() -> None:
    none = {"maze": MAZE.model_copy(update={"eval_episodes": 0}), "math": MATH.model_copy(update={"eval_episodes": 0})}
    assert step_bound_s(run(**none)) == step_bound_s(run(eval_every=0))


def test_every_run_saves_a_checkpoint() -> None:
    assert step_bound_s(run()) == step_bound_s(run(checkpoint_every=0))


# Rows: a deadline, and how often one step may wait for it. Of an episode there are 5 attempts in each of 3 rounds.
OF_THE_RUN = {
    "publish_s": 1,
    "save_s": 1,
    "train_s": 1,
    "stage_s": 4,
    "update_s": 4,
    "model_loads_s": 4,
    "worker_starts_s": 0,
    "no_engine_s": 0,
    "turn_s": 15 * 3,
    "reward_s": 15 * 5,
}
OF_A_TASK = {"reset_deadline_s": 15, "step_deadline_s": 15 * 3, "share_deadline_s": 1}


@pytest.mark.parametrize(("name", "times"), OF_THE_RUN.items())
def test_the_bound_grows_with_every_deadline_of_the_run(name: str, times: int) -> None:
    longer = DEADLINES.model_copy(update={name: getattr(DEADLINES, name) + 1.0})
    assert step_bound_s(run(deadlines=longer, maze=MAZE)) - step_bound_s(run(maze=MAZE)) == times


@pytest.mark.parametrize(("name", "times"), OF_A_TASK.items())
def test_the_bound_grows_with_every_deadline_of_a_task(name: str, times: int) -> None:
    longer = MAZE.model_copy(update={name: getattr(MAZE, name) + 1.0})
    assert step_bound_s(run(maze=longer)) - step_bound_s(run(maze=MAZE)) == times


@given(st.sampled_from(list(OF_A_TASK)), st.sampled_from(["maze", "math"]), st.floats(0.0, 1e6))
def test_no_task_makes_a_step_shorter_by_taking_longer(name: str, task: str, more_s: float) -> None:
    tasks = {"maze": MAZE, "math": MATH}
    tasks[task] = tasks[task].model_copy(update={name: getattr(tasks[task], name) + more_s})
    assert step_bound_s(run(**tasks)) >= step_bound_s(run())


# --- against what it bounds -----------------------------------------------------------------------------------------


def test_a_held_out_group_is_hopeless_after_so_many_members_and_not_before() -> None:
    book = GroupBook()
    bound = StalenessBound(1, check_every_turn=True)
    ticket = Ticket(-1, Prompt(id=PromptId("p"), task="maze", seed=0))
    group = book.open(GroupId(0), ticket, Purpose.EVAL, size=1, bound=bound)
    for attempt in range(EVAL_ATTEMPTS):
        assert not group.hopeless
        book.member_started(group.id, TrajectoryId(attempt))
        book.member_ended(group.id, TrajectoryId(attempt), Outcome.ENV_FAILED)
    assert group.hopeless


def shares_of(config: RunConfig) -> ShareBook:
    groups = config.groups_per_batch()
    book = ShareBook(
        {name: ShareRule(groups[name], task.share_deadline_s, task.unfilled) for name, task in config.tasks.items()}
    )
    book.wait_started(0.0)
    return book


def test_a_slow_task_that_fills_its_share_late_may_be_asked_to_fill_in_with_all_its_time() -> None:
    config = run(
        fast=TaskSettings(share_deadline_s=1.0),
        slow=TaskSettings(share_deadline_s=100.0),
    )
    book = shares_of(config)
    assert book.check({}, now=1.0) is None, "no task can fill in for the fast one yet"
    assert isinstance(book.check({"slow": 2}, now=99.0), Redistributed)
    assert book.next_wake() == 199.0
    assert isinstance(book.check({"slow": 2}, now=199.0), Unfillable)
    assert 199.0 < shares_bound_s(config) == 200.0


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from([1.0, 10.0, 100.0]), min_size=2, max_size=3),
    st.lists(st.integers(0, 7), min_size=8, max_size=8),
)
def test_however_badly_shares_are_filled_a_batch_never_waits_longer_than_the_bound(
    deadlines_s: list[float], choices: list[int]
) -> None:
    """Which tasks fill their shares is chosen at every deadline; ready groups stay ready."""
    config = run(**{f"task{n}": TaskSettings(share_deadline_s=limit_s) for n, limit_s in enumerate(deadlines_s)})
    book = shares_of(config)
    ready = dict.fromkeys(config.tasks, 0)
    now = 0.0
    turn = itertools.cycle(choices)
    while short := book.missing(ready):
        verdict = book.check(ready, now)
        if isinstance(verdict, Redistributed):
            continue
        if isinstance(verdict, Unfillable):
            break
        wake = book.next_wake()
        assert wake is not None, "a batch that is short has a deadline"
        choice = next(turn)
        fills = [task for n, task in enumerate(config.tasks) if task in short and choice >> n & 1]
        for task in fills:
            ready[task] = book.need[task]
        # The worst moment is the last one before the deadline.
        now = max(now, wake - 0.01) if fills else wake
    assert now <= shares_bound_s(config)
