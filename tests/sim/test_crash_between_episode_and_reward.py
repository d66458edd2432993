"""A controller that dies between the end of an episode and its reward: no reward is lost or counted twice."""

from collections import Counter

from rollart.observe.audit import audit
from rollart.sim.crashes import run_world
from rollart.sim.fuzz import World
from rollart.types import journal as j
from rollart.types.ids import TrajectoryId
from rollart.types.trajectory import TRAINABLE, GroupOutcome, Outcome

TABLES = {
    "name": "killed",
    "seed": 5,
    "steps": 4,
    "checkpoint_every": 1,
    "mode": "rollart",
    "batch": {"trajectories": 8, "group_size": 4, "extra_members": 0},
    "tasks": {
        "game": {
            "environments": 12,
            "max_turn_tokens": 128,
            "max_context": 2000,
            "rewards": [{"name": "own"}, {"name": "best", "weight": 0.5}],
        }
    },
    "pools": {"wide": {"engines": 2}},
    "sim": {
        "model": "tiny",
        "engine": {"slots": 4, "max_context": 2000, "pull_gb_s": 1.0, "progress_interval_s": 0.05},
        "trainer": {"hardware": "fast", "ranks": 4, "push_gb_s": 0.5},
        "reward": {"serverless": True},
        "tasks": {
            "game": {
                "prompt_tokens": 40,
                "observation_tokens": 10,
                "answer_tokens": 40,
                "turns": {"kind": "uniform", "low": 1, "high": 4},
                "step_s": {"kind": "uniform", "low": 0.01, "high": 0.1},
                "reward_s": {"kind": "uniform", "low": 0.5, "high": 2.0},
                "group_rewards": ["best"],
            }
        },
    },
}


def test_what_waited_for_rewards_is_cancelled_and_its_prompts_are_trained_once() -> None:
    caught = 0
    for tenth in range(10, 40, 3):
        done = run_world(World(1, TABLES, controller_dies_at_s=(tenth / 10,)))
        assert done.violations == []
        caught += check(done.events)
    assert caught, "some of the deaths hit trajectories that waited for their group"


def check(events: list[j.JournalEvent]) -> int:
    """Number of trajectories with their own reward and without that of their group, when the controller died."""
    assert audit(events) == []
    resumed = next(index for index, event in enumerate(events) if isinstance(event, j.RunResumed))
    given: dict[TrajectoryId, list[str]] = {}
    for event in events[:resumed]:
        if isinstance(event, j.RewardGiven):
            for id in event.trajectories:
                given.setdefault(id, []).append(event.name)
    arrived = Counter(event.trajectory for event in events if isinstance(event, j.RewardArrived))
    assert set(arrived.values()) <= {1}
    ends = {event.trajectory: event for event in events if isinstance(event, j.TrajectoryEnded)}
    waited = [id for id, names in given.items() if names == ["own"] and ends[id].at >= 0 and id not in arrived]
    cancelled = [id for id in waited if ends[id].cause == "the controller was lost"]
    for id in cancelled:
        assert ends[id].outcome is Outcome.CANCELLED
        assert ends[id].reward is None
    trained = [id for event in events if isinstance(event, j.BatchClaimed) for id in event.trajectories]
    assert not set(cancelled) & set(trained)
    assert all(ends[id].outcome in TRAINABLE for id in trained)
    tickets = {event.group: event.ticket for event in events if isinstance(event, j.GroupOpened)}
    groups = [e.group for e in events if isinstance(e, j.GroupEnded) and e.outcome is GroupOutcome.TRAINED]
    assert max(Counter(tickets[group] for group in groups).values()) == 1, "no prompt is trained twice"
    return len(cancelled)
