"""Worlds in which the fuzzer found a bug, shrunk and written out: seeds draw other worlds when the drawing changes."""

from collections import Counter

from rollart.sim.crashes import run_world
from rollart.sim.fuzz import World
from rollart.types.journal import StepTrained, TrajectoryEnded
from rollart.types.trajectory import Outcome

CONGESTED_REWARDS = World(
    seed=501169,
    tables={
        "name": "congested-rewards",
        "seed": 501169,
        "steps": 3,
        "mode": "rollart",
        "alpha": 2,
        "batch": {"trajectories": 48, "group_size": 3, "extra_members": 1},
        "tasks": {
            "task1": {
                "environments": 48,
                "max_turn_tokens": 29,
                "max_context": 4096,
                "share_deadline_s": 600.0,
            },
        },
        "pools": {"fast": {"engines": 1}},
        "deadlines": {"reward_s": 10.0},
        "sim": {
            "model": "tiny",
            "engine": {"slots": 6, "max_context": 4096},
            "trainer": {"hardware": "fast"},
            "reward": {"slots": 1},
            "tasks": {
                "task1": {
                    "prompt_tokens": 30,
                    "observation_tokens": 8,
                    "answer_tokens": 11,
                    "turns": 3,
                    "reset_s": 0.1,
                    "step_s": 0.1,
                    "reward_s": 0.8,
                },
            },
        },
    },
)
"""One slot for rewards, and up to 192 trajectories that wait for it: 150 s of work, asked for within seconds. Nothing
fails in this world. It once ended with `ShareUnfilled` and 1,320 trajectories without a reward."""


def test_a_long_queue_for_rewards_costs_no_trajectory() -> None:
    done = run_world(CONGESTED_REWARDS)
    assert done.violations == []
    assert sum(isinstance(event, StepTrained) for event in done.events) == 3
    outcomes = Counter(event.outcome for event in done.events if isinstance(event, TrajectoryEnded))
    assert set(outcomes) == {Outcome.COMPLETED, Outcome.REDUNDANT}
    assert outcomes.total() == 192


def test_a_queue_longer_than_the_patience_costs_trajectories_but_not_the_capacity() -> None:
    """Requests that wait too long fail. The slot serves those still waiting, and the batch fills at its pace."""
    slow = {"task1": CONGESTED_REWARDS.tables["sim"]["tasks"]["task1"] | {"reward_s": 2.0}}
    tables = CONGESTED_REWARDS.tables | {"sim": CONGESTED_REWARDS.tables["sim"] | {"tasks": slow}}
    done = run_world(CONGESTED_REWARDS._replace(tables=tables))
    assert done.violations == []
    ends = [event for event in done.events if isinstance(event, TrajectoryEnded)]
    failed = [end for end in ends if end.outcome is Outcome.REWARD_FAILED]
    assert failed
    assert all("no reward worker was free for 190 s" in end.cause for end in failed)
    scored = sum(end.outcome is Outcome.COMPLETED for end in ends)
    assert scored >= 144
    assert done.events[-1].at < 2.0 * (144 + 48) + 10.0, "the slot was never busy with requests that were given up"
