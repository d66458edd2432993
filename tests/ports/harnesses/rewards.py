"""Rewards: simulated, serverless, and a function in the host."""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from harnesses.common import COUNTS, TASK, Count, profile, prompt
from rollart.backends.rewards.host import RewardHost
from rollart.conformance.reward import RewardHarness
from rollart.ports.worker import Worker
from rollart.sim.reward import SimReward
from rollart.types.ids import PromptId, TrajectoryId
from rollart.types.messages import EpisodeRecord, ScoreRequest
from rollart.types.transcript import Transcript, TranscriptTurn, pack


def judge(t: Transcript) -> Any:
    """The sum of the turns' rewards, unless the artifact wants something else. The prompt's id names the counter."""
    COUNTS[int(t.prompt_id)].add()
    if t.artifact == b"raise":
        raise RuntimeError("429 too many requests")
    wrong: dict[bytes, Any] = {b"nan": math.nan, b"inf": math.inf, b"string": "1.0", b"none": None}
    return wrong.get(t.artifact, t.earned)


async def rank(group: list[Transcript]) -> list[float]:
    """How much more each earned than the least."""
    least = min(t.earned for t in group)
    return [t.earned - least for t in group]


def in_parts(t: Transcript) -> dict[str, float]:
    return {"earned": t.earned, "turns": float(len(t.turns))}


def episode(index: int, artifact: bytes = b"", counter: int = 0) -> EpisodeRecord:
    rewards = (0.5, float(index))
    packed = pack(
        Transcript(
            task=TASK,
            trajectory=TrajectoryId(index),
            prompt_id=PromptId(str(counter)),
            seed=prompt(index).seed,
            member=0,
            turns=tuple(TranscriptTurn("", "", reward) for reward in rewards),
            artifact=artifact,
        )
    )
    return EpisodeRecord(TrajectoryId(index), prompt(index).seed, rewards, transcript=packed)


def question(index: int, artifact: bytes = b"", counter: int = 0) -> ScoreRequest:
    return ScoreRequest(f"{index}/{artifact.decode()}", TASK, "judge", (episode(index, artifact, counter),))


def group(members: int) -> ScoreRequest:
    return ScoreRequest(f"group/{members}", TASK, "rank", tuple(episode(index) for index in range(members)))


def hosted(function: Callable[..., Any]) -> Callable[[Callable[[], None]], Worker]:
    settings = {"function": f"{judge.__module__}:{function.__name__}", "slots": 2}
    return lambda wake: RewardHost(settings, wake)


def hosted_reward() -> RewardHarness:
    calls = Count()
    return RewardHarness(
        build=hosted(judge),
        question=lambda index: question(index, counter=calls.number),
        virtual=False,
        failing=question(0, b"raise", calls.number),
        not_finite=tuple(question(0, artifact, calls.number) for artifact in (b"nan", b"inf", b"string", b"none")),
        calls=lambda: calls.value,
        of_group=hosted(rank),
        group=group,
        in_parts=hosted(in_parts),
    )


def simulated_reward(**changes: Any) -> RewardHarness:
    def simulated(**shape: Any) -> Callable[[Callable[[], None]], Worker]:
        settings = {"tasks": {TASK: profile(**shape)}, "seed": 3} | changes
        return lambda wake: SimReward(settings, wake)

    return RewardHarness(
        build=simulated(),
        question=question,
        virtual=True,
        failing=msgspec.structs.replace(question(9), task="unknown"),
        of_group=simulated(group_rewards=("rank",)),
        group=group,
        in_parts=simulated(part_rewards=("judge",)),
    )


REWARDS: dict[str, Callable[[], RewardHarness]] = {
    "sim": lambda: simulated_reward(slots=2),
    "sim-serverless": lambda: simulated_reward(serverless=True, cold_start_s=5.0, idle_s=10.0),
    "host": hosted_reward,
}
