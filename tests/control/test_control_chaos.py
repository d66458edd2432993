"""Random faults from a seed: the journal keeps every rule and the run ends, done or with a named error.

A seed that fails replays: `pytest tests/control/test_control_chaos.py -k 17`.
"""

import random
from collections.abc import Callable, Sequence

import pytest
from audit import sound
from worlds import MODES, Echo, Events, Kill, LateJoin, Rule, Silent, SlowSink, run, two_tasks, world

from rollart.sim.scenario import Scenario
from rollart.types.errors import RunError, StalledRun
from rollart.types.ids import WorkerId
from rollart.types.messages import (
    Observed,
    Published,
    Scored,
    ScoreFailed,
    Staged,
    Trained,
    TurnDone,
    Updated,
    WorkerEvent,
)

PLACES = ("engine/wide/0", "engine/wide/1", "engine/fast/0", "environment/game/0", "environment/game/1", "reward/0")
Changed = Sequence[WorkerEvent | tuple[float, WorkerEvent]]
KINDS = (TurnDone, Staged, Updated, Observed, Scored)
DEADLINES = (
    "deadlines.turn_s=20",
    "deadlines.reward_s=3",
    "deadlines.engine_silent_s=5",
    "deadlines.stage_s=10",
    "deadlines.update_s=4",
    "deadlines.worker_starts_s=15",
    "deadlines.model_loads_s=15",
    "deadlines.no_engine_s=15",
    "deadlines.train_s=60",
    "tasks.game.reset_deadline_s=5",
    "tasks.game.step_deadline_s=3",
)


def scenario(chance: random.Random) -> Scenario:
    make = chance.choice((world, two_tasks))
    return make(
        *DEADLINES,
        f"mode={chance.choice(MODES)}",
        f"alpha={chance.randrange(3)}",
        f"seed={chance.randrange(1000)}",
        f"rolling_update={chance.choice(('true', 'false'))}",
        f"batch.extra_members={chance.choice((0, 0, 1))}",
        f"batch.extra_groups={chance.choice((0, 0, 1))}",
        f"eval_every={chance.choice((0, 2))}",
        "tasks.game.eval_episodes=3",
        f'tasks.game.stale="{chance.choice(("abort", "mask"))}"',
        "tasks.game.environments_per_worker=6",
        f"tasks.game.environments={chance.choice((12, 18))}",
        f"sim.tasks.game.reset_failure={chance.choice((0, 0.1))}",
        f"sim.tasks.game.step_failure={chance.choice((0, 0.05))}",
        'sim.tasks.game.step_s={kind="uniform", low=0.01, high=0.1, tail_share=0.02, tail=4.0}',
        "steps=5",
    )


def sometimes(
    share: float, chance: random.Random, change: Callable[[WorkerEvent], Changed]
) -> Callable[[WorkerId, WorkerEvent, int], Changed]:
    return lambda _worker, event, _number: change(event) if chance.random() < share else (event,)


def fault(chance: random.Random) -> Rule:
    place, kind, share = chance.choice(PLACES), chance.choice(KINDS), chance.choice((0.02, 0.1, 0.3))
    own = random.Random(chance.random())
    match chance.randrange(8):
        case 0:
            return Kill(place, chance.uniform(0, 8))
        case 1:
            return Silent(f"{place}.0", chance.uniform(0, 6))
        case 2:
            return LateJoin(place, chance.uniform(0, 5))
        case 3:
            return Events("", kind, sometimes(min(share, 0.1), own, lambda _: ()))
        case 4:
            return Events("", chance.choice((*KINDS, Trained, Published)), sometimes(share, own, lambda e: (e, e)))
        case 5:
            return Events(place, kind, sometimes(share, own, lambda e: ((own.uniform(0, 2), e),)))
        case 6:
            return Echo(chance.choice((*KINDS, Trained, Published)), chance.uniform(0, 3))
        case _:
            return Events("", Scored, sometimes(share, own, lambda e: (ScoreFailed(e.key, "429"),)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(60))
def test_the_rules_hold_whatever_fails(seed: int) -> None:
    chance = random.Random(seed)
    world_of_seed = scenario(chance)
    faults = [fault(chance) for _ in range(chance.randrange(5))]
    sink = SlowSink(chance.choice((0.0, 0.3, 1.0)))
    ran = run(world_of_seed, *faults, sink=sink)
    sound(ran)
    assert ran.error is None or (isinstance(ran.error, RunError) and not isinstance(ran.error, StalledRun))
