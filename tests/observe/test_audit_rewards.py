"""The audit of rewards believes nothing: a journal whose rewards were tampered with does not pass."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from rollart.observe.audit import audit
from rollart.observe.report import make_report
from rollart.observe.steps import StepFold, StepRecord
from rollart.sim.crashes import run_world
from rollart.sim.faults import Fault
from rollart.sim.fuzz import World
from rollart.types import journal as j
from rollart.types.ids import TrajectoryId

Journal = list[j.JournalEvent]
TABLES: dict[str, Any] = {
    "seed": 3,
    "steps": 4,
    "mode": "sync_plus",
    "batch": {"trajectories": 8, "group_size": 4, "extra_members": 0},
    "tasks": {
        "game": {
            "environments": 12,
            "max_turn_tokens": 128,
            "max_context": 2000,
            "rewards": [{"name": "own"}, {"name": "style", "default": 0.5}, {"name": "best", "weight": 0.5}],
        }
    },
    "pools": {"wide": {"engines": 2}},
    "sim": {
        "model": "tiny",
        "engine": {"slots": 4, "max_context": 2000, "pull_gb_s": 1.0},
        "trainer": {"hardware": "fast", "ranks": 4, "push_gb_s": 0.5},
        "reward": {"serverless": True},
        "tasks": {
            "game": {
                "prompt_tokens": 40,
                "observation_tokens": 10,
                "answer_tokens": 40,
                "turns": {"kind": "uniform", "low": 1, "high": 4},
                "reward_s": 0.1,
                "group_rewards": ["best"],
                "part_rewards": ["style"],
            }
        },
    },
}
NONSENSE = Fault(14, "nonsense", "reward/", on="Scored", share=0.2, limit=100)
"""Some of the rewards fail for good: the default is used, or the trajectory ends without one."""


@pytest.fixture(scope="module")
def clean() -> Journal:
    done = run_world(World(1, TABLES, (NONSENSE,)))
    assert done.violations == []
    return done.events


def index_of(events: Journal, kind: type, counts: Callable[[Any], bool] = lambda _: True) -> int:
    return next(index for index, event in enumerate(events) if isinstance(event, kind) and counts(event))


def is_group(event: j.RewardGiven) -> bool:
    return len(event.trajectories) == 4


def is_default(event: j.RewardGiven) -> bool:
    return event.defaulted


def moved(event: j.RewardGiven) -> j.RewardGiven:
    return replace(event, values=(event.values[0] + 1.0, *event.values[1:]))


ALTERED: dict[str, tuple[type, Callable[[Any], bool], Callable[[Any], j.JournalEvent]]] = {
    "a value": (j.RewardGiven, lambda e: e.name == "own", moved),
    "a value of a group": (j.RewardGiven, is_group, moved),
    "a name": (j.RewardGiven, lambda e: e.name == "own", lambda e: replace(e, name="style")),
    "a value that is no number": (j.RewardGiven, is_group, lambda e: replace(e, values=(float("nan"), *e.values[1:]))),
    "too few values": (j.RewardGiven, is_group, lambda e: replace(e, values=e.values[1:])),
    "a default that is not marked": (j.RewardGiven, is_default, lambda e: replace(e, defaulted=False)),
    "a mark without a failure": (
        j.RewardGiven,
        lambda e: e.name == "style" and not e.defaulted,
        lambda e: replace(e, defaulted=True),
    ),
    "a default of another value": (j.RewardGiven, is_default, lambda e: replace(e, values=(0.75,))),
    "a member of another group": (
        j.RewardGiven,
        is_group,
        lambda e: replace(e, trajectories=(*e.trajectories[:3], TrajectoryId(e.trajectories[3] + 4))),
    ),
    "a member less": (
        j.RewardGiven,
        is_group,
        lambda e: replace(e, trajectories=e.trajectories[:3], values=e.values[:3]),
    ),
    "what failed": (j.RewardFailed, lambda e: e.name == "style", lambda e: replace(e, name="own")),
    "the sum": (j.RewardArrived, lambda _: True, lambda e: replace(e, value=e.value + 1.0)),
}


@pytest.mark.parametrize("what", ALTERED)
def test_something_is_altered(clean: Journal, what: str) -> None:
    kind, counts, change = ALTERED[what]
    index = index_of(clean, kind, counts)
    assert audit([*clean[:index], change(clean[index]), *clean[index + 1 :]])


REPEATED: list[tuple[type, Callable[[Any], bool]]] = [
    (j.RewardGiven, lambda e: e.name == "own"),
    (j.RewardGiven, is_group),
    (j.RewardGiven, is_default),
    (j.RewardFailed, lambda e: e.name == "style"),
]


@pytest.mark.parametrize(("kind", "counts"), REPEATED)
def test_something_is_missing_or_comes_twice(clean: Journal, kind: type, counts: Callable[[Any], bool]) -> None:
    index = index_of(clean, kind, counts)
    assert audit(clean[:index] + clean[index + 1 :]), "removed"
    assert audit([*clean[: index + 1], *clean[index:]]), "doubled"


def test_metrics_and_report_have_every_reward_by_name(clean: Journal) -> None:
    given = [event for event in clean if isinstance(event, j.RewardGiven)]
    report = make_report(clean)
    assert set(report.reward_parts) == {
        "game/own",
        "game/style",
        "game/style.one",
        "game/style.other",
        "game/best",
    }
    own = [value for event in given if event.name == "own" for value in event.values]
    assert report.reward_parts["game/own"] == pytest.approx(sum(own) / len(own))
    assert report.reward_parts["game/best"] == pytest.approx(0.0), "above and below the mean of every group"
    assert report.rewards_defaulted == {"game/style": sum(event.defaulted for event in given)}
    fold = StepFold()
    steps = [record for event in clean for record in fold.take(event)] + fold.finish()
    records = [record for record in steps if isinstance(record, StepRecord)]
    assert all("game/style.one" in record.reward_parts for record in records)
    assert sum(sum(record.defaulted.values()) for record in records) <= report.rewards_defaulted["game/style"]
