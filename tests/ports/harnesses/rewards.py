"""Rewards: simulated, serverless, and a function in the host."""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from harnesses.common import COUNTS, TASK, Count, profile, prompt
from rollart.backends.rewards.host import RewardHost
from rollart.conformance.reward import RewardHarness
from rollart.sim.reward import SimReward
from rollart.types.ids import PromptId, TrajectoryId
from rollart.types.messages import ScoreRequest


def judge(question: ScoreRequest) -> Any:
    """The sum of the turns' rewards, unless the artifact wants something else. The prompt's id names the counter."""
    COUNTS[int(question.prompt.id)].add()
    if question.artifact == b"raise":
        raise RuntimeError("429 too many requests")
    wrong: dict[bytes, Any] = {b"nan": math.nan, b"inf": math.inf, b"string": "1.0", b"none": None}
    return wrong.get(question.artifact, sum(question.turn_rewards))


def question(index: int, artifact: bytes = b"") -> ScoreRequest:
    return ScoreRequest(
        key=f"{index}/{artifact.decode()}",
        trajectory=TrajectoryId(index),
        task=TASK,
        prompt=prompt(index),
        turn_rewards=(0.5, float(index)),
        artifact=artifact,
        truncated=False,
    )


def hosted_reward() -> RewardHarness:
    settings = {"function": f"{judge.__module__}:judge", "slots": 2}
    calls = Count()

    def counted(index: int, artifact: bytes = b"") -> ScoreRequest:
        asked = question(index, artifact)
        return msgspec.structs.replace(
            asked, prompt=msgspec.structs.replace(asked.prompt, id=PromptId(str(calls.number)))
        )

    return RewardHarness(
        build=lambda wake: RewardHost(settings, wake),
        question=counted,
        virtual=False,
        failing=counted(0, b"raise"),
        not_finite=tuple(counted(0, artifact) for artifact in (b"nan", b"inf", b"string", b"none")),
        calls=lambda: calls.value,
    )


def simulated_reward(**changes: Any) -> RewardHarness:
    settings = {"tasks": {TASK: profile()}, "seed": 3} | changes
    return RewardHarness(
        build=lambda wake: SimReward(settings, wake),
        question=question,
        virtual=True,
        failing=msgspec.structs.replace(question(9), task="unknown"),
    )


REWARDS: dict[str, Callable[[], RewardHarness]] = {
    "sim": lambda: simulated_reward(slots=2),
    "sim-serverless": lambda: simulated_reward(serverless=True, cold_start_s=5.0, idle_s=10.0),
    "host": hosted_reward,
}
