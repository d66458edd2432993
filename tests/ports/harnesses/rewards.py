"""Rewards: simulated, serverless, and a function in threads, in processes, and behind a URL."""

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from reward_server import RewardServer, Seen, hang
from starlette.responses import Response

from harnesses.common import COUNTS, TASK, Count, profile, prompt
from rollart.backends.rewards.host import RewardHost
from rollart.backends.rewards.remote_host import RemoteHost
from rollart.backends.rewards.replica_host import ReplicaHost
from rollart.conformance.reward import RewardHarness
from rollart.ports.worker import Worker
from rollart.sim.reward import SimReward
from rollart.types.ids import PromptId, TrajectoryId
from rollart.types.messages import EpisodeRecord, ScoreRequest
from rollart.types.transcript import Transcript, TranscriptTurn, pack


def judge(t: Transcript) -> Any:
    """The sum of the turns' rewards, unless the artifact wants something else. The prompt's id names the counter."""
    if int(t.prompt_id) in COUNTS:
        COUNTS[int(t.prompt_id)].add()
    if t.artifact == b"hang":
        threading.Event().wait()
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


def hanging(index: int) -> ScoreRequest:
    """It hangs for as long as its process lives."""
    return msgspec.structs.replace(question(index, b"hang"), deadline_s=0.5)


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
        counts_use=True,
    )


class Served:
    """A reward worker together with the server that it calls."""

    def __init__(self, function: Callable[..., Any], wake: Callable[[], None], **settings: Any) -> None:
        self._server = RewardServer(f"{judge.__module__}:{function.__name__}", hang_on_request)
        self._server.__enter__()
        self._worker = RemoteHost({"url": self._server.url, "slots": 2, **settings}, wake)
        self.info, self.post, self.advance = self._worker.info, self._worker.post, self._worker.advance

    def close(self) -> None:
        self._worker.close()
        self._server.__exit__()


async def hang_on_request(_: int, seen: Seen) -> Response | None:
    """A thread of the server would hang for good."""
    return await hang() if any(call.transcripts[0].artifact == b"hang" for call in seen.request.calls) else None


def replicated(function: Callable[..., Any]) -> Callable[[Callable[[], None]], Worker]:
    settings = {"function": f"{judge.__module__}:{function.__name__}", "slots": 2}
    return lambda wake: ReplicaHost(settings, wake)


def replicated_reward() -> RewardHarness:
    """Calls cannot be counted from here."""
    return replace(
        hosted_reward(),
        build=replicated(judge),
        of_group=replicated(rank),
        in_parts=replicated(in_parts),
        calls=None,
        hanging=lambda index: msgspec.structs.replace(hanging(index), deadline_s=5.0),
    )


def served(function: Callable[..., Any], **settings: Any) -> Callable[[Callable[[], None]], Worker]:
    return lambda wake: Served(function, wake, **settings)


def served_reward(**settings: Any) -> RewardHarness:
    return replace(
        hosted_reward(),
        build=served(judge, **settings),
        of_group=served(rank, **settings),
        in_parts=served(in_parts, **settings),
        hanging=hanging,
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
    "processes": replicated_reward,
    "url": served_reward,
    "url-batches": lambda: served_reward(batch=3, slots=1),
}
