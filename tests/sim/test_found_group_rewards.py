"""A world with group rewards in which the fuzzer found a bug, shrunk and written out."""

from rollart.sim.crashes import run_world
from rollart.sim.faults import Fault
from rollart.sim.fuzz import World
from rollart.types.journal import RewardGiven

COMPARED_DURING_AN_UPDATE = World(
    seed=1102214,
    tables={
        "name": "compared-during-a-rolling-update",
        "seed": 1102214,
        "steps": 3,
        "mode": "rollart",
        "alpha": 0,
        "checkpoint_every": 3,
        "eval_every": 0,
        "rolling_update": True,
        "reward_workers": 1,
        "batch": {"trajectories": 15, "group_size": 3, "extra_groups": 1, "extra_members": 0},
        "tasks": {
            "task0": {
                "share": 1,
                "hardware": "any",
                "environments": 24,
                "environments_per_worker": 4,
                "max_turns": 7,
                "max_turn_tokens": 64,
                "max_context": 4096,
                "stale": "mask",
                "reset_deadline_s": 15.0,
                "step_deadline_s": 10.0,
                "share_deadline_s": 600.0,
                "eval_episodes": 1,
                "alpha": 2,
                "stale_retries": 0,
                "late_alpha": 3,
            },
            "task1": {
                "share": 3,
                "hardware": "any",
                "environments": 24,
                "environments_per_worker": 8,
                "max_turns": 8,
                "max_turn_tokens": 42,
                "max_context": 4096,
                "stale": "mask",
                "reset_deadline_s": 15.0,
                "step_deadline_s": 10.0,
                "share_deadline_s": 600.0,
                "eval_episodes": 5,
                "stale_retries": 1,
                "late_alpha": 1,
                "rewards": [{"name": "reward0"}],
            },
            "task2": {
                "share": 1,
                "hardware": "any",
                "environments": 24,
                "environments_per_worker": 10,
                "max_turns": 4,
                "max_turn_tokens": 41,
                "max_context": 4096,
                "stale": "mask",
                "reset_deadline_s": 15.0,
                "step_deadline_s": 10.0,
                "share_deadline_s": 600.0,
                "eval_episodes": 5,
            },
        },
        "pools": {"fast": {"engines": 1}, "wide": {"engines": 1}},
        "deadlines": {
            "engine_silent_s": 10.0,
            "turn_s": 60.0,
            "worker_starts_s": 45.0,
            "model_loads_s": 45.0,
            "no_engine_s": 45.0,
            "stage_s": 30.0,
            "update_s": 20.0,
            "train_s": 120.0,
            "publish_s": 60.0,
            "save_s": 60.0,
            "reward_s": 10.0,
            "stall_report_s": 60.0,
        },
        "sim": {
            "model": "tiny",
            "engine": {
                "slots": 16,
                "max_context": 4096,
                "kv_on_update": "recompute",
                "pull_gb_s": 0.15155177098107872,
                "progress_interval_s": 0.49160368602417515,
            },
            "trainer": {"hardware": "fast", "ranks": 1, "push_gb_s": 0.7037575257966083},
            "reward": {"serverless": True, "slots": 1, "cold_start_s": 0.732356916956355},
            "tasks": {
                "task0": {
                    "prompt_tokens": 75.0,
                    "observation_tokens": 26.5,
                    "answer_tokens": 4,
                    "turns": 5.5,
                    "reset_s": 0.76693558875512,
                    "step_s": 0.07134896133017044,
                    "reward_s": 0.3948731109893999,
                    "reset_failure": 0.0,
                    "step_failure": 0.0,
                    "success": 0.4998791002760429,
                },
                "task1": {
                    "prompt_tokens": {"kind": "uniform", "low": 10, "high": 61},
                    "observation_tokens": {"kind": "uniform", "low": 1, "high": 19},
                    "answer_tokens": {"kind": "lognormal", "median": 22, "sigma": 0.8, "min": 1},
                    "turns": {"kind": "uniform", "low": 3, "high": 8},
                    "reset_s": {"kind": "lognormal", "median": 0.173830740020406, "sigma": 0.937488908383975},
                    "step_s": {"kind": "lognormal", "median": 0.46187214908532237, "sigma": 0.8122098438104967},
                    "reward_s": {"kind": "lognormal", "median": 0.4302458281461638, "sigma": 0.5},
                    "reset_failure": 0.0,
                    "step_failure": 0.0,
                    "success": 0.2835008991400201,
                    "group_rewards": ["reward0"],
                    "part_rewards": [],
                },
                "task2": {
                    "prompt_tokens": 69.5,
                    "observation_tokens": 26.5,
                    "answer_tokens": 30,
                    "turns": 5.5,
                    "reset_s": 0.08360536354471894,
                    "step_s": 0.4655045933035941,
                    "reward_s": 0.18018025545202854,
                    "reset_failure": 0.0,
                    "step_failure": 0.0,
                    "success": 0.6552334533789337,
                },
            },
        },
    },
    faults=(
        Fault(20, "late", "engine/", on="Updated", for_s=3.748679153126122, skip=4, limit=10_000, incarnations=100),
    ),
    controller_dies_at_s=(11.4401101230109,),
)
"""Engines are updated one by one, and slowly. A group is compared at its last chance by the newest version in service;
the audit took the version of the last complete update, and saw a group that had more time."""


def test_a_group_is_compared_at_its_last_chance_during_a_rolling_update() -> None:
    done = run_world(COMPARED_DURING_AN_UPDATE)
    assert done.violations == []
    compared = [event for event in done.events if isinstance(event, RewardGiven) and len(event.trajectories) == 2]
    assert compared
