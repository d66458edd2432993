"""Simulated reward functions: fixed slots on a dedicated machine, or serverless functions that scale to zero.

Every `ScoreRequest` is answered by one `Scored`. The value of an episode is the sum of its turn rewards; a reward that
sees the group gives what that is above the mean of the group, and one with parts gives half of it as each of two. A
duplicate request is ignored while the first is pending, and answered again afterwards.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollart.ports.worker import Advance
from rollart.sim.workload import TaskProfile, shared_workloads
from rollart.types.errors import InvariantBroken
from rollart.types.messages import RewardInfo, Scored, ScoreFailed, ScoreRequest, WorkerCommand, WorkerEvent

_UNLIMITED = 1_000_000


class SimReward:
    """One reward worker. Settings:

    tasks: Mapping[str, TaskProfile]    seed: int    slots: int    concurrent calls; others wait in order
    serverless: bool                    no limit except `slots`, if given; the first call after being idle for
    cold_start_s: float, idle_s: float  `idle_s`, and those that arrive meanwhile, wait `cold_start_s`
    """

    def __init__(self, settings: Mapping[str, Any], _wake: Callable[[], None]) -> None:
        self._serverless: bool = settings.get("serverless", False)
        self._slots: int = settings.get("slots", _UNLIMITED) if self._serverless else settings["slots"]
        self._cold_start_s: float = settings.get("cold_start_s", 0.0)
        self._idle_s: float = settings.get("idle_s", 60.0)
        seed: int = settings["seed"]
        self._workloads = shared_workloads(settings["tasks"], seed)
        self._commands: list[WorkerCommand] = []
        self._open: set[str] = set()
        self._queue: deque[ScoreRequest] = deque()
        self._due: list[tuple[float, int, Scored]] = []
        self._asked = 0
        self._warm_at = 0.0
        self._last_used = -math.inf

    def info(self) -> RewardInfo:
        return RewardInfo(slots=self._slots, elastic=self._serverless)

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:
        events: list[WorkerEvent] = []
        self._give(now, events)
        if self._commands:
            commands, self._commands = self._commands, []
            for command in commands:
                if not isinstance(command, ScoreRequest):
                    raise InvariantBroken(f"a reward worker does not accept {type(command).__name__}")
                self._ask(command, events)
            self._start(now)
            self._give(now, events)
        return Advance(events, self._due[0][0] if self._due else None)

    def close(self) -> None:
        self._commands.clear()
        self._queue.clear()
        self._due.clear()

    def _ask(self, score: ScoreRequest, events: list[WorkerEvent]) -> None:
        if score.key in self._open:
            return
        if score.task not in self._workloads:
            events.append(ScoreFailed(score.key, f"there is no profile of task {score.task!r} here", retry=False))
            return
        self._open.add(score.key)
        self._queue.append(score)

    def _start(self, now: float) -> None:
        while self._queue and len(self._due) < self._slots:
            score = self._queue.popleft()
            begin = now
            if self._serverless:
                # Idle time is counted from the last answer, and only while no call is pending.
                if not self._due and now - self._last_used > self._idle_s:
                    self._warm_at = now + self._cold_start_s
                self._last_used = now
                begin = max(now, self._warm_at)
            workload, first = self._workloads[score.task], score.episodes[0]
            latency_s = workload.reward_s(first.seed, len(first.turn_rewards))
            self._asked += 1
            answer = _answer(score, workload.profile)
            heapq.heappush(self._due, (begin + latency_s, self._asked, answer))

    def _give(self, now: float, events: list[WorkerEvent]) -> None:
        while self._due and self._due[0][0] <= now:
            at, _, answer = heapq.heappop(self._due)
            self._open.discard(answer.key)
            self._last_used = max(self._last_used, at)
            events.append(answer)
            # A queued call starts when a slot becomes free, even if this call of `advance` comes late.
            self._start(at)


def _answer(score: ScoreRequest, profile: TaskProfile) -> Scored:
    values = [float(sum(episode.turn_rewards)) for episode in score.episodes]
    if score.reward in profile.group_rewards:
        mean = sum(values) / len(values)
        values = [value - mean for value in values]
    parts = [{"one": value / 2, "other": value / 2} for value in values] if score.reward in profile.part_rewards else []
    return Scored(score.key, tuple(values), tuple(parts))
