"""What all reward workers share: each key is computed once, and every answer is accounted for.

    controller ──ScoreRequest──► RewardShell ──_start(request)──► threads, processes, actors, a URL
               ◄──FunctionsUsed, Scored, ScoreFailed── RewardShell ◄──finish(key, answer, use)──

Invariants: a key is computed once however often it is requested, unless it failed with `retry`; each request that is
started is finished once; the use of an answer is reported before it or together with it.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from rollart.ports.worker import Advance
from rollart.types.errors import InvariantBroken
from rollart.types.messages import (
    FunctionsUsed,
    RewardInfo,
    Scored,
    ScoreFailed,
    ScoreRequest,
    WorkerCommand,
    WorkerEvent,
)
from rollart.types.reward_use import RewardUse, add_uses, bucket

REMEMBERED_KEYS = 4096
"""Number of answers kept for de-duplication."""

Answer = Scored | ScoreFailed


class RewardShell:
    """The protocol of a reward worker. A subclass computes: `_start` is called in the worker's thread and must not
    block, `finish` and `used` may be called in any."""

    def __init__(self, info: RewardInfo, price: float, wake: Callable[[], None]) -> None:
        self._info = info
        self._price = price
        self._wake = wake
        self._open: dict[str, tuple[ScoreRequest, float]] = {}
        """Requests that are being computed, with the times at which they came."""
        self._answers: dict[str, Answer] = {}
        self._commands: deque[WorkerCommand] = deque()
        self._results: deque[tuple[str, Answer | None, RewardUse]] = deque()
        """Route, answer and use; without an answer, use that belongs to no single call."""

    def info(self) -> RewardInfo:
        return self._info

    def post(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands.extend(commands)

    def advance(self, now: float) -> Advance:  # noqa: ARG002 - driven by threads, not by time
        events: list[WorkerEvent] = []
        uses: dict[str, RewardUse] = {}
        while self._results:
            route, answer, use = self._results.popleft()
            if answer is not None:
                self._settle(answer, use)
                events.append(answer)
            use.cost = use.replica_s * self._price
            add_uses(uses, {route: use})
        while self._commands:
            command = self._commands.popleft()
            if not isinstance(command, ScoreRequest):
                raise InvariantBroken(f"a reward worker does not accept {type(command).__name__}; a bug in rollart")
            if command.key in self._answers:
                events.append(self._answers[command.key])
            elif command.key not in self._open:
                self._open[command.key] = command, time.monotonic()
                self._start(command)
        return Advance([FunctionsUsed(uses), *events] if uses else events, None)

    def close(self) -> None:
        raise NotImplementedError

    def finish(self, request: ScoreRequest, answer: Answer, use: RewardUse) -> None:
        """Answer a request that was started; once."""
        self._results.append((request.route, answer, use))
        self._wake()

    def used(self, route: str, use: RewardUse) -> None:
        """Report use besides that of an answer; sent with the next one."""
        self._results.append((route, None, use))

    @property
    def _pending(self) -> int:
        """Number of requests that are being computed."""
        return len(self._open)

    def _start(self, request: ScoreRequest) -> None:
        raise NotImplementedError

    def _settle(self, answer: Answer, use: RewardUse) -> None:
        _, came_at = self._open.pop(answer.key)
        use.calls += 1
        use.failed += isinstance(answer, ScoreFailed)
        use.latencies = {bucket(time.monotonic() - came_at): 1}
        if isinstance(answer, Scored) or not answer.retry:
            self._answers[answer.key] = answer
            if len(self._answers) > REMEMBERED_KEYS:
                del self._answers[next(iter(self._answers))]
