"""A real run with several rewards, one of a group, from its config to `rollart reward try`."""

from pathlib import Path

import pytest

import rollart
from rollart.app.reward_trial import try_reward
from rollart.app.transcript_store import read_transcripts
from rollart.observe.journal import fold_journal, read_journal
from rollart.types.journal import BatchClaimed, RewardGiven, TrajectoryStarted
from rollart.types.trajectory import TRAINABLE, Purpose


class Echo:
    """Two turns; the second answer counts."""

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]  # noqa: ARG002
        self.turns = 0
        return f"say {seed}", {}

    def step(self, action: str):  # type: ignore[no-untyped-def]
        self.turns += 1
        return f"heard {len(action)}", 0.5, self.turns == 2, False, {"artifact": "end"}


def letters(t: rollart.Transcript) -> float:
    assert t.turns[0].observation == f"say {t.seed}"
    assert t.artifact == b"end"
    return sum(char.isalpha() for char in t.final_text) / 8


async def shape(t: rollart.Transcript) -> dict[str, float]:
    return {"length": len(t.final_text) / 8, "earned": t.earned}


def longest(group: list[rollart.Transcript]) -> list[float]:
    most = max(len(t.final_text) for t in group)
    return [float(len(t.final_text) == most) for t in group]


@pytest.mark.timeout(250)
def test_several_rewards_in_a_real_run(tmp_path: Path) -> None:
    rewards = [letters, {"function": shape, "weight": 0.5, "default": 0.0}, {"function": longest, "name": "best"}]
    task = rollart.Task(Echo, rewards=rewards, max_turns=2, max_turn_tokens=8, environments=8, eval_episodes=4)
    result = rollart.run(
        tasks={"echo": task},
        model=rollart.tiny_model(),
        batch={"trajectories": 8, "group_size": 4},
        steps=3,
        eval_every=3,
        out=tmp_path / "run",
    )
    report = result.report
    assert set(report.reward_parts) == {
        *("echo/letters", "echo/shape", "echo/shape.earned", "echo/shape.length", "echo/best"),
    }
    assert report.reward_parts["echo/shape.earned"] == pytest.approx(1.0)
    assert report.rewards_defaulted == {}
    journal = tmp_path / "run" / "journal.sqlite"
    violations, _ = fold_journal(journal)[1].finish()
    assert violations == []

    events = list(read_journal(journal))
    group_of = {event.trajectory: event.group for event in events if isinstance(event, TrajectoryStarted)}
    given = {
        (event.name, id): value
        for event in events
        if isinstance(event, RewardGiven)
        for id, value in zip(event.trajectories, event.values, strict=True)
    }
    stored = {each.trajectory: each for each in read_transcripts(tmp_path / "run" / "transcripts")}
    trained = [id for event in events if isinstance(event, BatchClaimed) for id in event.trajectories]
    for id in trained:
        each, t = stored[id], stored[id].transcript()
        assert each.outcome in TRAINABLE
        assert each.purpose is Purpose.TRAIN
        assert given["letters", id] == letters(t)
        mates = [stored[other].transcript() for other in trained if group_of[other] == group_of[id]]
        assert given["best", id] == float(len(t.final_text) == max(len(mate.final_text) for mate in mates))
        assert each.reward == pytest.approx(given["letters", id] + 0.5 * given["shape", id] + given["best", id])

    again = try_reward(f"{__file__}:letters", tmp_path / "run", reward="letters")
    assert all(not each.changed for each in again.transcripts if each.before is not None)
