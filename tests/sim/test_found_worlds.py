"""Worlds in which the fuzzer found a bug, shrunk and written out: seeds draw other worlds when the drawing changes."""

import math
from collections import Counter

from rollart.sim.crashes import run_world
from rollart.sim.faults import Fault
from rollart.sim.fuzz import Drain, World
from rollart.types.elasticity import ElasticCause
from rollart.types.journal import (
    EnginesChanged,
    MemberReplaced,
    MembersLost,
    StepTrained,
    TrajectoryEnded,
    WorkerDied,
    WorkerWaits,
)
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


SLOW_ROLLING_UPDATES = World(
    seed=904754,
    tables={
        "name": "slow-rolling-updates",
        "seed": 904754,
        "steps": 7,
        "mode": "rollart",
        "alpha": 2,
        "checkpoint_every": 1,
        "rolling_update": True,
        "batch": {"trajectories": 8, "group_size": 4, "extra_members": 1},
        "tasks": {
            "task0": {
                "environments": 23,
                "environments_per_worker": 8,
                "max_turns": 6,
                "max_turn_tokens": 21,
                "max_context": 4096,
                "reset_deadline_s": 15.0,
                "step_deadline_s": 10.0,
                "share_deadline_s": 600.0,
                "stale_retries": 1,
                "hardware": "any",
            },
        },
        "pools": {"fast": {"engines": 3}, "wide": {"engines": 3}},
        "sim": {
            "model": "tiny",
            "engine": {
                "slots": 12,
                "max_context": 4096,
                "kv_on_update": "keep",
                "pull_gb_s": 0.4545909167244206,
                "progress_interval_s": 1.9604743646546872,
            },
            "trainer": {"hardware": "fast", "ranks": 2, "push_gb_s": 0.8134159494875467},
            "reward": {"slots": 4, "cold_start_s": 0.46311166538254833},
            "tasks": {
                "task0": {
                    "prompt_tokens": {"kind": "uniform", "low": 10, "high": 35},
                    "observation_tokens": {"kind": "uniform", "low": 1, "high": 28},
                    "answer_tokens": {"kind": "lognormal", "median": 16, "sigma": 0.8, "min": 1},
                    "turns": {"kind": "lognormal", "median": 1.519125708029447, "sigma": 0.6, "min": 1, "max": 12},
                    "reset_s": {"kind": "lognormal", "median": 0.3235816373630043, "sigma": 0.5389464851193757},
                    "step_s": {"kind": "lognormal", "median": 0.4825486620171088, "sigma": 0.9943263870753042},
                    "reward_s": {"kind": "lognormal", "median": 0.30008891921887226, "sigma": 0.5},
                },
            },
        },
    },
    faults=(
        Fault(10, "late", "environment/task0/", on="Observed", for_s=33.42705018560367, share=0.1110217448928258),
        Fault(20, "late", "engine/", on="Updated", for_s=2.998249697008081, limit=10_000, incarnations=100),
    ),
)
"""Members of a ready group start at different versions, because an update takes long. The group lost one of its five
members with an update and was still whole, but it was neither ready nor short of members after that, for ever."""


def test_a_ready_group_that_loses_an_extra_member_is_still_ready() -> None:
    done = run_world(SLOW_ROLLING_UPDATES)
    assert done.violations == []
    assert sum(isinstance(event, StepTrained) for event in done.events) == 7
    assert any(isinstance(event, MembersLost) for event in done.events)


FROZEN_ENGINE = World(
    seed=1207851,
    tables={
        "name": "frozen-engine",
        "seed": 1207851,
        "steps": 8,
        "mode": "sync_plus",
        "alpha": 0,
        "batch": {"trajectories": 4, "group_size": 4, "extra_members": "auto"},
        "tasks": {
            "task0": {
                "hardware": "any",
                "environments": 9,
                "environments_per_worker": 6,
                "max_turns": 4,
                "max_turn_tokens": 46,
                "max_context": 4096,
                "step_deadline_s": 10.0,
                "share_deadline_s": 600.0,
            },
        },
        "pools": {"fast": {"engines": 1}, "wide": {"engines": 1}},
        "deadlines": {"engine_silent_s": 10.0, "turn_s": 60.0, "model_loads_s": 45.0, "no_engine_s": 45.0},
        "sim": {
            "model": "tiny",
            "engine": {"slots": 7, "max_context": 4096},
            "trainer": {"hardware": "fast"},
            "tasks": {
                "task0": {
                    "prompt_tokens": 30,
                    "observation_tokens": 8,
                    "answer_tokens": 15,
                    "turns": 2,
                    "reset_s": 0.2,
                    "step_s": 0.2,
                    "reward_s": 0.3,
                },
            },
        },
    },
    faults=(Fault(3, "freeze", "engine/wide/", at_s=5.0, for_s=math.inf),),
)
"""An engine freezes, and members at it are replaced every two seconds, long before it counts as silent. While aborted
requests did not count as requests, it was never found, got most turns, because it was idle, and no batch was filled."""


def test_an_engine_that_never_answers_an_abort_is_silent() -> None:
    done = run_world(FROZEN_ENGINE)
    assert done.violations == []
    assert sum(isinstance(event, StepTrained) for event in done.events) == 8
    deaths = [event for event in done.events if isinstance(event, WorkerDied)]
    assert [death.worker for death in deaths] == ["engine/wide/0.0"]
    assert deaths[0].reason.startswith("silent for 10 s")


EVERYTHING_SLOWS_DOWN = World(
    seed=1,
    tables={
        "name": "everything-slows-down",
        "seed": 1,
        "steps": 30,
        "mode": "rollart",
        "alpha": 1,
        "batch": {"trajectories": 8, "group_size": 4},
        "tasks": {"task0": {"environments": 16, "max_turn_tokens": 64, "max_context": 4096, "share_deadline_s": 600.0}},
        "pools": {"fast": {"engines": 1, "inject": [{"decode": 20.0, "prefill": 20.0, "from_s": 6.0}]}},
        "sim": {
            "model": "tiny",
            "engine": {"slots": 16, "max_context": 4096},
            "trainer": {"hardware": "fast"},
            "tasks": {
                "task0": {
                    "prompt_tokens": 30,
                    "observation_tokens": 8,
                    "answer_tokens": 40,
                    "turns": 3,
                    "reset_s": 0.1,
                    "step_s": 0.1,
                    "reward_s": 0.1,
                },
            },
        },
    },
)
"""The only pool becomes twenty times slower. Every member was then late and replaced before it could finish, for ever,
because patience is measured from members that finish."""


def test_members_finish_when_everything_slows_down() -> None:
    done = run_world(EVERYTHING_SLOWS_DOWN)
    assert done.violations == []
    assert sum(isinstance(event, StepTrained) for event in done.events) == 30
    assert any(isinstance(event, MemberReplaced) for event in done.events)


WAITING_TRAINER_DRAINS = World(
    seed=1408105,
    tables={
        "name": "waiting-trainer-drains",
        "seed": 1408105,
        "steps": 2,
        "mode": "sync",
        "alpha": 0,
        "batch": {"trajectories": 4, "group_size": 4},
        "tasks": {"task0": {"hardware": "any", "environments": 8, "max_turn_tokens": 43, "max_context": 4096}},
        "pools": {"fast": {"engines": {"min": 1, "max": 6, "start": 5}}, "wide": {"engines": 1}},
        "trainer": {"pool": "fast"},
        "elasticity": {"confirm_s": 5.5},
        "deadlines": {"drain_s": 10.0},
        "sim": {
            "model": "tiny",
            "engine": {"slots": 6, "max_context": 4096},
            "trainer": {"hardware": "fast"},
            "nodes": [{"pool": "fast", "engines": 4}, {"pool": "wide", "engines": 1}],
            "tasks": {
                "task0": {
                    "prompt_tokens": 30,
                    "observation_tokens": 8,
                    "answer_tokens": 15,
                    "turns": 2,
                    "reset_s": 0.2,
                    "step_s": 0.2,
                    "reward_s": 0.3,
                },
            },
        },
    },
    drains=(Drain(11.5, "trainer/"),),
)
"""The engines of a pool leave no room for the trainer, which drains while it waits. Its successor waits on: the next
engine that makes room is given up when both together have waited for long enough. The audit took it for a new wait."""


def test_the_successor_of_a_trainer_that_waited_waits_on() -> None:
    done = run_world(WAITING_TRAINER_DRAINS)
    assert done.violations == []
    assert sum(isinstance(event, StepTrained) for event in done.events) == 2
    causes = [event.cause for event in done.events if isinstance(event, EnginesChanged)]
    assert ElasticCause.TRAINER in causes
    waits = [event.worker for event in done.events if isinstance(event, WorkerWaits)]
    assert {"trainer/0.0", "trainer/0.1"} <= set(waits)
