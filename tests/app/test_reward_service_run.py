"""Real runs with rewards elsewhere: a service that fails, hangs and repeats itself, and functions that never return."""

import ctypes
import json
import os
from pathlib import Path

import pytest
from reward_server import RewardServer, hang, status

import rollart
from rollart.app.transcript_store import read_transcripts
from rollart.observe.journal import fold_journal, read_journal
from rollart.types.errors import ConfigError
from rollart.types.journal import RewardGiven, RewardsUsed, TrajectoryEnded
from rollart.types.trajectory import Outcome

SECRET = "s3cret-of-the-service"
MARK = "ROLLART_TEST_MARK"


class Echo:
    """One turn. Its observations have an access key in them."""

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]  # noqa: ARG002
        return f"say {seed}, with key-4711", {}

    def step(self, action: str):  # type: ignore[no-untyped-def]
        return f"heard {len(action)}; {SECRET}", 0.5, True, False, {}


def letters(t: rollart.Transcript) -> float:
    assert "key-4711" in t.turns[0].observation  # rewards see everything
    return sum(char.isalpha() for char in t.final_text) / 8


def stubborn(t: rollart.Transcript) -> float:
    """Never returns the first time, and holds the interpreter lock meanwhile."""
    try:
        with Path(os.environ[MARK]).open("x"):
            ctypes.PyDLL(None).sleep(600)
    except FileExistsError:
        pass
    return float(len(t.final_text))


@pytest.mark.timeout(280)
def test_faults_of_rewards_cost_no_trajectory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 % errors, 5 % hangs and 5 % answers that come twice; besides, a function that holds the interpreter lock."""
    monkeypatch.setenv("SERVICE_SECRET", SECRET)
    monkeypatch.setenv(MARK, str(tmp_path / "mark"))

    async def misbehave(number, seen):  # type: ignore[no-untyped-def]
        if seen.headers["authorization"] != f"Bearer {SECRET}":
            return status(401)
        chance = (number * 0.6180339887) % 1.0
        if chance < 0.3:
            return status(500 if number % 2 else 429)
        if chance < 0.35:
            return await hang()
        return await server.answer(seen, times=2 if chance < 0.4 else 1)

    with RewardServer(f"{__name__}:letters", misbehave) as server:
        rewards = [
            {"function": letters, "run": server.url, "secret": "SERVICE_SECRET", "deadline_s": 5, "price": 0.5},
            {"function": stubborn, "run": "processes", "slots": 2, "weight": 0, "deadline_s": 10},
        ]
        task = rollart.Task(Echo, rewards=rewards, max_turns=1, max_turn_tokens=8, environments=16)
        result = rollart.run(
            tasks={"echo": task},
            model=rollart.tiny_model(),
            mode="sync_plus",  # every batch waits for all its trajectories
            batch={"trajectories": 32, "group_size": 4, "min_group_size": 4, "replace_late": False},
            steps=3,
            redact=["key-[0-9]+"],
            out=tmp_path / "run",
        )
    journal = tmp_path / "run" / "journal.sqlite"
    violations, _ = fold_journal(journal)[1].finish()
    assert violations == []
    outcomes = {event.outcome for event in read_journal(journal) if isinstance(event, TrajectoryEnded)}
    assert Outcome.REWARD_FAILED not in outcomes

    remote, local = result.report.functions["echo/letters"], result.report.functions["echo/stubborn"]
    given = [event for event in read_journal(journal) if isinstance(event, RewardGiven) and event.name == "letters"]
    assert remote.calls >= len(given) >= 48
    assert remote.retries > 0
    assert remote.cost == pytest.approx(0.5 * remote.replica_s)
    assert local.kills >= 1
    assert (tmp_path / "mark").exists()
    used = [event for event in read_journal(journal) if isinstance(event, RewardsUsed)]
    assert sum(event.uses["echo/letters"].calls for event in used if "echo/letters" in event.uses) == remote.calls
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps[0]["functions"]["echo/letters"]["p50_s"] > 0.0

    stored = list(read_transcripts(tmp_path / "run" / "transcripts"))
    assert stored
    assert all("key-4711" not in repr(each.transcript()) for each in stored)
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file() and "checkpoint" not in str(file):
            assert SECRET.encode() not in file.read_bytes(), file
            assert b"key-4711" not in file.read_bytes() or file.name.startswith("journal"), file


def test_actors_need_ray_and_processes_need_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_SECRET", raising=False)
    for reward, key, why in (
        ({"function": letters, "run": "actors"}, "run", "use --runtime ray"),
        ({"function": "__main__:f", "run": "processes"}, "run", "notebook"),
        ({"function": letters, "run": "https://h", "secret": "NO_SUCH_SECRET"}, "secret", "is not set"),
    ):
        monkeypatch.setattr("__main__.f", letters, raising=False)
        with pytest.raises(ConfigError, match=rf"tasks.echo.rewards.0.{key}: .*{why}"):
            rollart.run(
                tasks={"echo": rollart.Task(Echo, rewards=[reward])}, model=rollart.tiny_model(), out=tmp_path / "run"
            )
