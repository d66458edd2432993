"""Players: episodes of a script, through the environment host of a run, and their rewards."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import parrot
import pytest

from rollart.app.api import merged
from rollart.app.demonstrations import read_demonstrations
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.types.errors import RequestError, TaskBroken
from rollart.types.transcript import Transcript

HERE = __name__
EPISODES = 6
CALLS: list[str] = []
REWARDED = {"min_reward": 0.0}


def read(player: str = f"{parrot.__file__}:player", said: list[str] | None = None, **changes: Any) -> list[Any]:
    sft = {"episodes": EPISODES, **changes.pop("sft", {})}
    config = check(RunConfig, merged(parrot.CONFIG, {**changes, "sft": sft}))
    return read_demonstrations(config, [player], [].append if said is None else said.append)


def rewards(*given: Any, task: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"tasks": {"parrot": {"rewards": list(given), **(task or {})}}, "sft": REWARDED}


def lake(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001
    return "down"


def test_environments_of_libraries_are_played() -> None:
    pytest.importorskip("gymnasium")
    task = {"environment": "gym:FrozenLake-v1", "max_turn_tokens": 8, "max_context": 4096}
    found = read(f"{HERE}:lake", tasks={"parrot": task})
    assert len(found) == EPISODES
    assert all(each.sequences[0] for each in found)


def test_a_prompt_that_is_played_again_is_another_episode() -> None:
    found = read(f"{parrot.__file__}:clumsy", tasks={"parrot": {"prompts": [0, 1]}}, sft={"episodes": 40})
    answers = {tuple(tuple(answer) for _, answer in each.sequences[0]) for each in found}
    assert len(answers) == 4, "of two letters, each right or wrong"


class Flaky(parrot.Parrot):
    """Fails where the first letter is a."""

    def step(self, action: str) -> Any:
        if self.letter == "a":
            raise ConnectionError("the service is down")
        return super().step(action)


class Wrong(parrot.Parrot):
    def step(self, action: str) -> Any:
        raise AttributeError(action)


def test_episodes_that_an_environment_fails_are_left_out_and_counted() -> None:
    said: list[str] = []
    task = {"environment": f"{HERE}:Flaky", "prompts": [0, 4]}
    assert len(read(said=said, tasks={"parrot": task}, sft={"episodes": 4})) == 3
    assert "1 of 4 episodes failed and are left out: ConnectionError: the service is down" in said[0]
    with pytest.raises(TaskBroken, match="AttributeError"):
        read(tasks={"parrot": {"environment": f"{HERE}:Wrong"}})


def counted(t: Transcript) -> float:
    CALLS.append(t.final_text)
    return 0.5


async def awaited(t: Transcript) -> float:  # noqa: ARG001
    await asyncio.sleep(0)
    return 0.25


def broken(t: Transcript) -> float:  # noqa: ARG001
    raise ZeroDivisionError("by zero")


def test_rewards_are_computed_where_a_reward_is_asked_for() -> None:
    CALLS.clear()
    found = read(tasks={"parrot": {"reward": f"{HERE}:counted"}})
    assert ({each.reward for each in found}, CALLS) == ({None}, [])
    found = read(tasks={"parrot": {"reward": f"{HERE}:counted"}}, sft=REWARDED)
    assert ({each.reward for each in found}, len(CALLS)) == ({0.5}, EPISODES)


def test_rewards_may_be_async_also_in_a_notebook() -> None:
    async def notebook() -> list[Any]:
        return read(**rewards(f"{HERE}:counted", {"function": f"{HERE}:awaited", "weight": 2.0}))

    assert {each.reward for each in asyncio.run(notebook())} == {1.0}


def test_a_reward_that_fails_is_named_or_has_its_default() -> None:
    with pytest.raises(TaskBroken, match="the reward broken of parrot failed: ZeroDivisionError: by zero"):
        read(**rewards(f"{HERE}:broken"))
    found = read(**rewards({"function": f"{HERE}:broken", "default": 0.75}, f"{HERE}:counted"))
    assert {each.reward for each in found} == {1.25}


def test_a_reward_behind_a_url_needs_its_function() -> None:
    remote = {"name": "judge", "run": "https://rewards.example/judge"}
    with pytest.raises(RequestError, match=r"the reward judge of parrot is behind a URL, and sft\.min_reward needs"):
        read(**rewards(remote))
    assert {each.reward for each in read(**rewards({**remote, "function": f"{HERE}:counted"}))} == {0.5}
