"""Fuzz worlds from seeds: randomised clusters, workloads, modes and faults.

A seed decides everything, so a failure can be replayed. A world is a value: a shrinker removes parts of it as long as
it still fails.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollart.config.algorithm import AdvantageKind
from rollart.config.modes import Mode
from rollart.config.tasks import ANY, AUTO
from rollart.control.pipeline import MAX_FAILED_SAVES
from rollart.sim.draws import mix, stable_int, uniform
from rollart.sim.faults import Fault
from rollart.sim.lossy import LinkFaults
from rollart.types.trajectory import StaleTreatment

SECONDS_FOREVER = math.inf
PATIENT_S = 600.0
"""Share deadline of a task that has the time to fill in for others."""


class Drain(NamedTuple):
    """Row 33: at this time the nodes of all workers whose ids begin with `target` drain."""

    at_s: float
    target: str


class World(NamedTuple):
    """One world: a scenario as tables, and its faults."""

    seed: int
    tables: dict[str, Any]
    faults: tuple[Fault, ...] = ()
    link: LinkFaults | None = None
    controller_dies_at_s: tuple[float, ...] = ()
    drains: tuple[Drain, ...] = ()

    @property
    def fatal(self) -> bool:
        """Whether the run cannot survive, and so must end with a typed error."""
        return any(fault.row == 4 for fault in self.faults)


def one_task_is_patient(tables: Mapping[str, Any]) -> bool:
    """Whether some task has time to take over an unfilled share; otherwise the world itself makes the run fail."""
    return any(task["share_deadline_s"] >= PATIENT_S for task in tables["tasks"].values())


class _Dice:
    """Successive draws from one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._count = 0

    def real(self, low: float = 0.0, high: float = 1.0) -> float:
        self._count += 1
        return low + (high - low) * uniform(self._seed, self._count)

    def whole(self, low: int, high: int) -> int:
        """Both ends included."""
        return min(high, low + int(self.real() * (high - low + 1)))

    def chance(self, share: float) -> bool:
        return self.real() < share

    def one_of(self, *options: Any) -> Any:
        return options[self.whole(0, len(options) - 1)]


def make_world(seed: int, mode: Mode | None = None) -> World:
    """The world of a seed."""
    dice = _Dice(seed)
    drawn = list(Mode)[seed % len(Mode)]
    tables = _tables(dice, mode or drawn, seed) | {"algorithm": _algorithm(_Dice(mix(seed, stable_int("algorithm"))))}
    _congest(_Dice(mix(seed, stable_int("congestion"))), tables)
    _straggle(_Dice(mix(seed, stable_int("stragglers"))), tables)
    _find_hardware(_Dice(mix(seed, stable_int("affinity"))), tables)
    if dice.chance(0.02):
        return _fatal_world(seed, tables)
    tasks, pools = list(tables["tasks"]), list(tables["pools"])
    faults = _faults(dice, tasks, pools, tables)
    link = None
    if dice.chance(0.25):
        link = LinkFaults(
            seed=seed,
            loss=dice.real(0.0, 0.2),
            double=dice.real(0.0, 0.1),
            delay_s=dice.real(0.001, 0.2),
            cut_s=dice.one_of(0.0, 5.0),
        )
    deaths = tuple(sorted(dice.real(1.0, 40.0) for _ in range(dice.one_of(0, 0, 0, 1, 2))))
    if len(tasks) > 1 and dice.chance(0.4):
        # One task that often misses its share deadline, so that others fill in. The rest are patient enough to do so.
        tables["tasks"][dice.one_of(*tasks)]["share_deadline_s"] = dice.real(0.5, 20.0)
    if "affinity" in tables:
        faults += _lost_pool(_Dice(mix(seed, stable_int("lost pool"))), pools, tables)
    drains = _drains(_Dice(mix(seed, stable_int("drains"))), tasks, pools, tables)
    _stretch(_Dice(mix(seed, stable_int("elasticity"))), tables)
    faults += _rewards(_Dice(mix(seed, stable_int("rewards"))), tables)
    return World(seed, tables, tuple(faults), link, deaths, drains)


def _drains(dice: _Dice, tasks: list[str], pools: list[str], tables: dict[str, Any]) -> tuple[Drain, ...]:
    """In some worlds nodes drain: those of a worker, a pool or a role, or all. Independent random stream."""
    if not dice.chance(0.25):
        return ()
    tables["deadlines"]["drain_s"] = dice.one_of(1.0, 10.0, 60.0)
    targets = [*(f"engine/{pool}/" for pool in pools), *(f"environment/{task}/" for task in tasks)]
    targets += ["engine/fast/0", "engine/", "environment/", "reward/", "trainer/", ""]
    return tuple(Drain(dice.real(0.0, 40.0), dice.one_of(*targets)) for _ in range(dice.whole(1, 3)))


def _stretch(dice: _Dice, tables: dict[str, Any]) -> None:
    """In some worlds pools are elastic, and nodes come and go. Independent random stream.

    One node of the first pool stays, with room for its first engine and the trainer.
    """
    if not dice.chance(0.25):
        return
    tables["steps"] += dice.whole(4, 10)
    first, second = tables["pools"]
    least = {first: 1, second: dice.whole(0, 1)}
    for name, pool in tables["pools"].items():
        if name == first or dice.chance(0.8):
            most = dice.whole(2, 6)
            pool["engines"] = {"min": least[name], "max": most, "start": dice.whole(least[name], most)}
    tables["elasticity"] = {
        "min_wait": dice.real(0.05, 0.4),
        "confirm_steps": dice.whole(1, 3),
        "confirm_s": dice.real(0.5, 6.0),
        "hold_s": dice.real(1.0, 20.0),
    }
    tables["deadlines"]["drain_s"] = dice.one_of(1.0, 10.0, 60.0)
    if dice.chance(0.3):
        return  # there is room for everything
    nodes = [{"pool": first, "engines": dice.whole(2, 4)}]
    for name in tables["pools"]:
        for _ in range(dice.whole(1, 4)):
            from_s, stays_s = dice.one_of(0.0, dice.real(0.0, 60.0)), dice.one_of(None, dice.real(1.0, 40.0))
            node = {"pool": name, "engines": dice.whole(1, 4), "from_s": from_s}
            if stays_s is not None:
                node |= {"until_s": from_s + stays_s, "notice_s": dice.one_of(0.0, dice.real(0.5, 20.0))}
            nodes.append(node)
    tables["sim"]["nodes"] = nodes
    if dice.chance(0.3):
        pool = dice.one_of(first, second) if isinstance(tables["pools"][second]["engines"], dict) else first
        tables["trainer"] = {"pool": pool}
        nodes.append({"pool": pool, "engines": 2})


def _rewards(dice: _Dice, tables: dict[str, Any]) -> list[Fault]:
    """In some worlds tasks have several rewards, or group rewards, which may then fail more often. Independent random
    stream."""
    if not dice.chance(0.3):
        return []
    chosen = [name for name in tables["tasks"] if dice.chance(0.7)]
    for name, task in tables["tasks"].items():
        if name in chosen:
            rewards = [_reward(dice, f"reward{index}") for index in range(dice.whole(1, 3))]
            # One counts in full and has no default. The others never cancel it, or all rewards of a group were equal.
            rewards[0] = {"name": "reward0"}
            profile = tables["sim"]["tasks"][name]
            task["rewards"] = rewards
            profile["group_rewards"] = [reward["name"] for reward in rewards if dice.chance(0.5)]
            profile["part_rewards"] = [reward["name"] for reward in rewards if dice.chance(0.2)]
    if not chosen or dice.chance(0.5):
        return []
    many = dice.whole(5, 40)
    return [
        dice.one_of(
            Fault(12, "hang", "reward/", on="ScoreRequest", share=dice.real(0.02, 0.2), limit=many, incarnations=10),
            Fault(13, "fail", "reward/", on="ScoreRequest", share=dice.real(0.1, 0.6), limit=many, incarnations=10),
            Fault(13, "double", "reward/", on="Scored", share=dice.real(0.1, 0.6), limit=many, incarnations=10),
            Fault(14, "nonsense", "reward/", on="Scored", share=dice.real(0.1, 0.4), limit=many, incarnations=10),
            Fault(13, "kill", "reward/", on="ScoreRequest", skip=many),
        )
    ]


def _reward(dice: _Dice, name: str) -> dict[str, Any]:
    reward: dict[str, Any] = {"name": name}
    if dice.chance(0.5):
        reward["weight"] = dice.one_of(0.0, 0.25, -0.25)
    if dice.chance(0.4):
        reward["default"] = dice.one_of(0.0, 0.5)
    if dice.chance(0.3):
        reward["deadline_s"] = dice.real(2.0, 15.0)
    return reward


def _fatal_world(seed: int, tables: dict[str, Any]) -> World:
    """Row 4: after a few steps every engine is killed at an update, and none comes back."""
    batch = tables["batch"]
    batch["trajectories"] *= math.ceil(20 / batch["trajectories"])
    tables["steps"] = max(tables["steps"], 6)
    rounds = 4 * sum(pool["engines"] for pool in tables["pools"].values())
    faults = (
        Fault(4, "kill", "engine/", on="Update", skip=rounds, limit=1000, incarnations=1000),
        Fault(4, "absent", "engine/", once_struck=4, limit=1000, incarnations=1000),
    )
    return World(seed, tables, faults)


def _tables(dice: _Dice, mode: Mode, seed: int) -> dict[str, Any]:
    group_size = dice.whole(2, 4)
    tasks = [f"task{index}" for index in range(dice.whole(1, 3))]
    shares = {task: dice.whole(1, 3) for task in tasks}
    groups = sum(shares.values()) * dice.whole(1, 2)
    steps = max(dice.whole(3, 6), math.ceil(56 / (groups * group_size)))
    crowd = dice.chance(0.03)
    return {
        "name": f"fuzz-{seed}",
        "seed": seed,
        "steps": steps,
        "mode": mode.value,
        "alpha": dice.whole(0, 2),
        "checkpoint_every": dice.whole(1, 4),
        "eval_every": dice.one_of(0, 0, 2),
        "rolling_update": dice.chance(0.3),
        "reward_workers": dice.whole(1, 2),
        "batch": {
            "trajectories": groups * group_size,
            "group_size": group_size,
            "extra_groups": dice.one_of(0, 0, 0, 1),
            "extra_members": dice.one_of(0, 0, 0, 1),
        },
        "tasks": {task: _task(dice, shares[task], crowd=crowd) for task in tasks},
        "pools": {name: {"engines": dice.whole(1, 3)} for name in ("fast", "wide")},
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
        "sim": _sim(dice, tasks),
    }


def _algorithm(dice: _Dice) -> dict[str, Any]:
    """Drawn from its own dice, so that the rest of a world does not depend on it."""
    algorithm = {
        "advantage": dice.one_of(*(kind.value for kind in AdvantageKind)),
        "filter_zero_variance": dice.chance(0.2),
    }
    if algorithm["filter_zero_variance"] and dice.chance(0.5):
        algorithm["filter_limit"] = dice.one_of(0.0, 0.5, 1.0, 3.0)
    return algorithm


def _congest(dice: _Dice, tables: dict[str, Any]) -> None:
    """In a few worlds rewards are the bottleneck: a single slot, with more requests than fit into a deadline.

    Independent random stream. Such a world filters a limited number of groups, because otherwise the number of rewards
    per batch would be unbounded.
    """
    if dice.chance(0.04):
        if tables["algorithm"]["filter_zero_variance"]:
            tables["algorithm"].setdefault("filter_limit", 1.0)
        tables["reward_workers"] = tables["sim"]["reward"]["slots"] = 1
        for task in tables["sim"]["tasks"].values():
            task["reward_s"]["median"] = dice.real(0.8, 2.0)


def _straggle(dice: _Dice, tables: dict[str, Any]) -> None:
    """Group minimum, redundancy and bounds per task; in some worlds environments straggle. Own dice again."""
    batch = tables["batch"]
    size = batch["group_size"]
    if dice.chance(0.7):
        batch["min_group_size"] = dice.whole(2, size)
    if dice.chance(0.5):
        batch["extra_members"] = "auto"
        if dice.chance(0.5):
            batch["max_extra_members"] = dice.whole(0, 2)
    for name, task in tables["tasks"].items():
        if dice.chance(0.3):
            task["alpha"] = dice.whole(0, 3)
        if dice.chance(0.5):
            task["stale_retries"] = dice.whole(0, 2)
        if dice.chance(0.3):
            task["late_alpha"] = task.get("alpha", tables["alpha"]) + dice.whole(0, 4)
        if dice.chance(0.3):
            tail_s = dice.real(2.0, 9.0)
            tables["sim"]["tasks"][name]["step_s"].update(tail_share=dice.real(0.005, 0.05), tail=tail_s)


def _find_hardware(dice: _Dice, tables: dict[str, Any]) -> None:
    """In some worlds affinity is automatic, and pools change their speed. Independent random stream."""
    if not dice.chance(0.25):
        return
    tables["steps"] += dice.whole(2, 6)
    for task in tables["tasks"].values():
        if dice.chance(0.8):
            task["hardware"] = AUTO
    tables["affinity"] = {
        "explore": dice.one_of(0.0, 0.03, 0.2),
        "min_gain": dice.real(0.02, 0.2),
        "confirm_s": dice.real(0.4, 6.0),
        "hold_s": dice.real(2.0, 20.0),
    }
    for pool in tables["pools"].values():
        if dice.chance(0.7):
            pool["inject"] = [
                {"prefill": dice.real(1.0, 6.0), "decode": dice.real(1.0, 6.0), "from_s": dice.real(0.0, 40.0)}
                for _ in range(dice.whole(1, 3))
            ]


def _task(dice: _Dice, share: int, *, crowd: bool) -> dict[str, Any]:
    return {
        "share": share,
        "hardware": dice.one_of("fast", "wide", ANY),
        "environments": 1000 if crowd else dice.whole(4, 24),
        "environments_per_worker": 250 if crowd else dice.whole(4, 12),
        "max_turns": dice.whole(3, 8),
        "max_turn_tokens": dice.whole(8, 64),
        "max_context": 4096,
        "stale": dice.one_of(*(treatment.value for treatment in StaleTreatment)),
        "reset_deadline_s": 15.0,
        "step_deadline_s": 10.0,
        "share_deadline_s": PATIENT_S,
        "eval_episodes": dice.whole(1, 6),
    }


def _sim(dice: _Dice, tasks: list[str]) -> dict[str, Any]:
    return {
        "model": "tiny",
        "engine": {
            "slots": dice.whole(2, 16),
            "max_context": 4096,
            "kv_on_update": dice.one_of("recompute", "recompute", "keep"),
            "pull_gb_s": dice.real(0.02, 1.0),
            "progress_interval_s": dice.real(0.2, 2.0),
        },
        "trainer": {"hardware": "fast", "ranks": dice.whole(1, 4), "push_gb_s": dice.real(0.05, 1.0)},
        "reward": {"serverless": dice.chance(0.5), "slots": dice.whole(1, 4), "cold_start_s": dice.real(0.0, 1.0)},
        "tasks": {task: _workload(dice) for task in tasks},
    }


def _workload(dice: _Dice) -> dict[str, Any]:
    return {
        "prompt_tokens": {"kind": "uniform", "low": 10, "high": dice.whole(20, 200)},
        "observation_tokens": {"kind": "uniform", "low": 1, "high": dice.whole(5, 60)},
        "answer_tokens": {"kind": "lognormal", "median": dice.whole(3, 40), "sigma": 0.8, "min": 1},
        "turns": {"kind": "lognormal", "median": dice.real(1.0, 6.0), "sigma": 0.6, "min": 1, "max": 12},
        "reset_s": {"kind": "lognormal", "median": dice.real(0.01, 1.0), "sigma": dice.real(0.1, 1.0)},
        "step_s": {"kind": "lognormal", "median": dice.real(0.01, 0.5), "sigma": dice.real(0.1, 1.2)},
        "reward_s": {"kind": "lognormal", "median": dice.real(0.01, 0.5), "sigma": 0.5},
        "reset_failure": dice.one_of(0.0, 0.0, 0.05),
        "step_failure": dice.one_of(0.0, 0.0, 0.02),
        "success": dice.real(0.1, 0.9),
    }


def _faults(dice: _Dice, tasks: list[str], pools: list[str], tables: dict[str, Any]) -> list[Fault]:
    """A handful of faults; none in one world of ten."""
    if dice.chance(0.1):
        return []
    chosen = [_one_fault(dice, tasks, pools, tables) for _ in range(dice.whole(1, 5))]
    if dice.chance(0.1):
        chosen += _cut_rolling_update(dice, pools, tables)
    elif dice.chance(0.3):
        # A slow sync can be cut, and lets engines of two versions serve concurrently.
        slow = dice.real(0.2, 4.0)
        chosen.append(Fault(20, "late", "engine/", on="Updated", for_s=slow, limit=10_000, incarnations=100))
    return _disk_gets_free(chosen)


def _disk_gets_free(chosen: list[Fault]) -> list[Fault]:
    """Drop faults that would fail as many consecutive saves as end a run."""
    full = [number for number, fault in enumerate(chosen) if fault.kind == "full_disk"]
    return [fault for number, fault in enumerate(chosen) if number not in full[MAX_FAILED_SAVES - 1 :]]


def _cut_rolling_update(dice: _Dice, pools: list[str], tables: dict[str, Any]) -> list[Fault]:
    """A slow rolling update in which an engine dies soon after its commit: its turns move while two versions are
    served."""
    tables["rolling_update"] = True
    slow = dice.real(1.0, 4.0)
    first_ones = sum(tables["pools"][pool]["engines"] for pool in pools)
    victim, after_s = _engines_but_one(pools, tables)[0], slow + dice.real(0.1, slow)
    for name, task in tables["tasks"].items():
        task["hardware"] = victim.split("/")[1]
        task["environments"] = 24
        tables["sim"]["tasks"][name]["turns"] = {"kind": "uniform", "low": 3, "high": 8}
    return [
        Fault(20, "kill", victim, on="Updated", skip=1, for_s=after_s, incarnations=10),
        Fault(20, "late", "engine/", on="Updated", for_s=slow, skip=first_ones, limit=10_000, incarnations=100),
    ]


def _lost_pool(dice: _Dice, pools: list[str], tables: dict[str, Any]) -> list[Fault]:
    """In some worlds all engines of the second pool are gone for a while. Own dice again."""
    if not dice.chance(0.4):
        return []
    count, target = tables["pools"][pools[1]]["engines"], f"engine/{pools[1]}/"
    return [
        Fault(2, "kill", target, at_s=dice.real(2.0, 20.0), limit=count),
        Fault(5, "absent", target, once_struck=2, limit=dice.whole(count, 4 * count), incarnations=10),
    ]


def _engines_but_one(pools: list[str], tables: dict[str, Any]) -> list[str]:
    """All but the first engine of the first pool: progress is only guaranteed while one is healthy."""
    return [f"engine/{pool}/{index}" for pool in pools for index in range(tables["pools"][pool]["engines"])][1:]


def _one_fault(dice: _Dice, tasks: list[str], pools: list[str], tables: dict[str, Any]) -> Fault:
    task = f"environment/{dice.one_of(*tasks)}/"
    engine, whole_pool = dice.one_of(*_engines_but_one(pools, tables)), f"engine/{pools[1]}/"
    at = dice.real(0.5, 30.0)
    share = dice.real(0.02, 0.3)
    some = dice.whole(1, 6)
    late = dice.whole(3, 12)
    options = [
        Fault(1, "kill", engine, at_s=at),
        Fault(2, "kill", engine, at_s=at),
        Fault(2, "kill", whole_pool, at_s=at, limit=3),
        Fault(2, "kill", engine, on="TurnDone", skip=some),
        Fault(3, "freeze", engine, at_s=at, for_s=dice.one_of(5.0, 25.0, SECONDS_FOREVER)),
        Fault(3, "freeze", whole_pool, at_s=at, limit=2),
        Fault(5, "absent", engine, limit=1),
        Fault(6, "hang", task, on="Observed", share=share, limit=some),
        Fault(7, "kill", task, on="Step", skip=some),
        Fault(8, "blank", task, at_s=at),
        Fault(9, "limit", task, on="Observed", share=share, limit=some),
        Fault(10, "late", task, on="Observed", share=share, limit=some, for_s=dice.real(10.0, 40.0)),
        Fault(12, "hang", "reward/", on="ScoreRequest", share=share, limit=some),
        Fault(13, "fail", "reward/", on="ScoreRequest", share=share, limit=some),
        Fault(13, "double", "reward/", on="Scored", share=share, limit=some),
        Fault(14, "nonsense", "reward/", on="Scored", share=share, limit=some),
        Fault(15, "kill", "trainer/", on="Trained", skip=dice.whole(0, 3)),
        Fault(16, "kill", "trainer/", on="Save", skip=dice.whole(0, 2)),
        Fault(16, "full_disk", "trainer/", on="Save", limit=1),
        Fault(17, "hang", task, on="Observed", skip=late, limit=some),
        Fault(17, "hang", engine, on="TurnDone", skip=late),
        Fault(17, "hang", "trainer/", on="Trained", skip=dice.whole(0, 3)),
        Fault(17, "hang", "trainer/", on="Save", skip=dice.whole(0, 1)),
        Fault(18, "double", engine, on="TurnDone", share=share, limit=some),
        Fault(18, "double", task, on="Observed", share=share, limit=some),
        Fault(19, "late", "trainer/", on="Trained", for_s=dice.real(5.0, 40.0), limit=10, incarnations=10),
        Fault(19, "freeze", "trainer/", at_s=at, for_s=dice.one_of(25.0, SECONDS_FOREVER)),
        Fault(20, "kill", engine, on="Update", skip=dice.whole(0, 3)),
        Fault(20, "kill", engine, on="Updated", skip=dice.whole(1, 3), for_s=dice.real(0.3, 10.0)),
        Fault(20, "hang", engine, on="Update", skip=dice.whole(1, 3)),
        Fault(20, "hang", engine, on="Stage", skip=dice.whole(1, 3)),
        Fault(21, "corrupt", engine, on="Stage", skip=dice.whole(1, 3)),
        Fault(22, "kill", "trainer/", at_s=at),
    ]
    return options[dice.whole(0, len(options) - 1)]
