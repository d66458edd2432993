"""Client of one reward function behind a URL: gets answers despite a service that is busy, slow, failing or gone.

    call ──► waiting ──(room, pace, breaker)──► batch of one or more ──► request, and a hedge if it is late
               ▲                                                             │
               └──────── back-off ◄── busy, failed, or not in the response ──┤
    finish(answer, use) ◄── an answer, a refusal, too many failures, or the deadline

Invariants: every call is finished exactly once, by its deadline; later answers are ignored; at most
`slots` requests are under way, hedges aside; all requests of a call have its idempotency key. A service that is out of
reach costs time and no rewards: calls wait for it until their deadlines, or are computed here, if there is a fall-back.

Use in one event loop.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

from rollart.backends.rewards.pacing import Breaker, Hedging, Pace, backoff_s
from rollart.backends.rewards.remote_answers import Busy, Failed, Refused, answer_of, by_key
from rollart.backends.rewards.remote_exchange import Exchanged, RemoteExchange
from rollart.types.messages import Scored, ScoreFailed, ScoreRequest
from rollart.types.reward_use import RewardUse
from rollart.types.reward_wire import MAX_REQUEST_BYTES, FunctionResponse

MAX_SENDS = 6
"""Failures of the service after which a call is given back; the controller then decides whether to ask again."""
DEFAULT_DEADLINE_S = 120.0
_ENVELOPE_BYTES = 200

Answer = Scored | ScoreFailed


def closed(request: ScoreRequest) -> ScoreFailed:
    return ScoreFailed(request.key, "the client of the function was closed", retry=True)


class Fallback(NamedTuple):
    """Computes a reward here."""

    answer: Callable[[ScoreRequest], Awaitable[Answer]]
    slots: int
    """Maximum number of concurrent calls."""


class RemoteLimits(NamedTuple):
    """See `config.reward_place`."""

    slots: int
    batch: int = 1
    hedge: bool = True


class _Call:
    __slots__ = (
        "alone",
        "body",
        "deadline",
        "failures",
        "finish",
        "reason",
        "refusals",
        "request",
        "settled",
        "timer",
        "use",
    )

    def __init__(
        self,
        request: ScoreRequest,
        body: bytes,
        deadline: float,
        finish: Callable[[Answer, RewardUse], None],
    ) -> None:
        self.request = request
        self.body = body
        """JSON of its `FunctionCall`."""
        self.deadline = deadline
        self.finish = finish
        self.use = RewardUse()
        self.failures = 0
        self.refusals = 0
        self.reason = ""
        """Why it was not answered the last time."""
        self.alone = False
        """Sent without others: another call of its batch may have caused the failure."""
        self.settled = False
        self.timer: asyncio.TimerHandle | None = None


class RemoteClient:
    """See the module."""

    def __init__(
        self,
        exchange: RemoteExchange,
        limits: RemoteLimits,
        spent: Callable[[str, RewardUse], None],
        fallback: Fallback | None = None,
    ) -> None:
        """`spent` is called with what each request took, by the route of its first call."""
        self._exchange = exchange
        self._spent = spent
        self._closed = False
        self._limits = limits
        self._fallback = fallback
        self._loop = asyncio.get_running_loop()
        self._pace = Pace(limits.slots)
        self._breaker = Breaker()
        self._hedging = Hedging()
        self._random = random.Random()
        self._waiting: deque[_Call] = deque()
        self._requests: dict[asyncio.Task[None], Sequence[_Call]] = {}
        """Requests under way."""
        self._resume: asyncio.TimerHandle | None = None
        self._open: dict[_Call, None] = {}
        """Calls that are not settled."""
        self._computing: dict[asyncio.Task[None], None] = {}
        """Calls that are computed here, or wait for that."""
        self._places = asyncio.Semaphore(fallback.slots if fallback is not None else 0)

    def call(self, request: ScoreRequest, body: bytes, finish: Callable[[Answer, RewardUse], None]) -> None:
        """Get an answer to a request. `body` is the JSON of its `FunctionCall`."""
        seconds = request.deadline_s or DEFAULT_DEADLINE_S
        call = _Call(request, body, self._loop.time() + seconds, finish)
        self._open[call] = None
        if self._closed:
            self._settle(call, closed(request))
            return
        if len(body) + _ENVELOPE_BYTES > MAX_REQUEST_BYTES:
            reason = f"its transcripts take {len(body):,} bytes; a request has at most {MAX_REQUEST_BYTES:,}"
            self._settle(call, ScoreFailed(request.key, reason, retry=False))
            return
        call.timer = self._loop.call_at(call.deadline, self._expire, call, seconds)
        self._waiting.append(call)
        self._send_waiting()

    async def close(self) -> None:
        """Stop all requests; calls that are open fail."""
        self._closed = True
        if self._resume is not None:
            self._resume.cancel()
        tasks = [*self._requests, *self._computing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._exchange.close()
        for call in list(self._open):
            self._settle(call, closed(call.request))

    # --- sending ----------------------------------------------------------------------------------------------------

    def _send_waiting(self) -> None:
        """Send what may be sent now, and come back when more may be."""
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        while self._waiting and not self._closed:
            if self._waiting[0].settled:
                self._waiting.popleft()
            elif self._fallback is not None and not self._breaker.closed and not self._may_probe():
                self._compute_here(self._waiting.popleft(), self._fallback)
            elif len(self._requests) >= self._pace.limit:
                return
            else:
                at = max(self._pace.resumes_at, self._breaker.opens_at)
                if at > self._loop.time():
                    if at != float("inf"):
                        self._resume = self._loop.call_at(at, self._send_waiting)
                    return
                self._send(self._next_batch())

    def _may_probe(self) -> bool:
        return self._breaker.opens_at <= self._loop.time()

    def _next_batch(self) -> list[_Call]:
        batch, size = [self._waiting.popleft()], _ENVELOPE_BYTES
        if batch[0].alone:
            return batch
        size += len(batch[0].body)
        while self._waiting and len(batch) < self._limits.batch and not self._waiting[0].alone:
            call = self._waiting[0]
            size += len(call.body) + 1
            if size > MAX_REQUEST_BYTES:
                break
            self._waiting.popleft()
            if not call.settled:
                batch.append(call)
        return batch

    def _send(self, batch: Sequence[_Call]) -> None:
        probe = self._breaker.sent()
        task = self._loop.create_task(self._carry(batch, probe))
        self._requests[task] = batch
        task.add_done_callback(partial(self._ended, probe))

    def _ended(self, probe: bool, task: "asyncio.Task[None]") -> None:
        batch = self._requests.pop(task)
        if task.cancelled():
            # All its calls are past their deadlines: the service hangs.
            self._breaker.failed(self._loop.time(), probe=probe)
        elif (error := task.exception()) is not None:
            for call in batch:
                self._settle(call, ScoreFailed(call.request.key, f"{type(error).__name__}: {error}", retry=True))
            self._breaker.undecided(probe=probe)
        self._send_waiting()

    async def _carry(self, batch: Sequence[_Call], probe: bool) -> None:
        until = min(call.deadline for call in batch)
        left_s = max(0.001, until - self._loop.time())
        calls = b",".join([call.body for call in batch])
        body = b'{"calls":[%b],"deadline_s":%b}' % (calls, f"{left_s:.3f}".encode())
        done = await self._hedged(batch[0], body)
        outcome = done.outcome
        now = self._loop.time()
        if isinstance(outcome, FunctionResponse):
            self._pace.answered()
            self._breaker.answered()
            self._take(batch, outcome, late=len(batch) > 1 and now >= until)
            return
        if isinstance(outcome, Refused):
            self._breaker.answered()
        elif isinstance(outcome, Busy):
            self._breaker.undecided(probe=probe)
            self._pace.busy(now, self._pause_s(outcome, 1), others=len(self._requests) - 1)
        else:
            self._breaker.failed(now, probe=probe)
        for call in batch:
            self._again(call, outcome, alone=len(batch) == 1)

    def _pause_s(self, outcome: Busy | Failed | Refused, attempt: int) -> float:
        """How long a call waits before it is sent again: at least as long as the service asks for."""
        if isinstance(outcome, Busy) and outcome.retry_after_s is not None:
            return outcome.retry_after_s * (1.0 + self._random.random() / 10)
        return backoff_s(attempt, self._random.random())

    async def _hedged(self, call: _Call, body: bytes) -> Exchanged:
        """Send a request, and again if it is late; the first response counts."""
        late_s = self._hedging.late_s() if self._limits.hedge else None
        tasks = [self._loop.create_task(self._one(call, body))]
        try:
            await asyncio.wait(tasks, timeout=late_s)
            if not tasks[0].done() and self._hedging.afford():
                call.use.hedges += 1
                tasks.append(self._loop.create_task(self._one(call, body)))
            left = set(tasks)
            while True:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                found = [task.result() for task in tasks if task in done]
                best = next((each for each in found if isinstance(each.outcome, FunctionResponse)), found[0])
                if not left or isinstance(best.outcome, FunctionResponse):
                    return best
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, call: _Call, body: bytes) -> Exchanged:
        began = self._loop.time()
        use = RewardUse(requests=1, bytes_out=len(body))
        try:
            done = await self._exchange.send(call.request.key, body)
            use.replica_s = _replica_s(done)
            use.bytes_in = done.received_bytes
            if isinstance(done.outcome, FunctionResponse):
                use.cold_starts = int(done.outcome.cold)
                self._hedging.answered(done.seconds)
            return done
        except asyncio.CancelledError:
            use.replica_s = self._loop.time() - began
            raise
        finally:
            self._spent(call.request.route, use)

    # --- answers ----------------------------------------------------------------------------------------------------

    def _take(self, batch: Sequence[_Call], response: FunctionResponse, *, late: bool) -> None:
        """`late`: at the deadline of one of the calls, so others may have had too little time."""
        answers = by_key(response.answers)
        for call in batch:
            answer = answer_of(call.request, answers)
            if answer is None:
                self._again(call, Failed("the response has no answer with its key"), alone=len(batch) == 1)
            elif late and isinstance(answer, ScoreFailed) and answer.retry:
                self._again(call, Failed(answer.reason), alone=False)
            else:
                self._settle(call, answer)

    def _again(self, call: _Call, outcome: Busy | Failed | Refused, *, alone: bool) -> None:
        """The call was not answered, sent alone or with others: send it again later, or give up."""
        if call.settled:
            return
        call.reason = outcome.reason
        call.alone = call.alone or not (alone or isinstance(outcome, Busy))
        if isinstance(outcome, Refused) and alone:
            self._settle(call, ScoreFailed(call.request.key, outcome.reason, retry=False))
            return
        call.failures += not isinstance(outcome, Busy)
        call.refusals += isinstance(outcome, Busy)
        at = self._loop.time() + self._pause_s(outcome, call.failures + call.refusals)
        if call.failures >= MAX_SENDS or at >= call.deadline:
            self._settle(call, ScoreFailed(call.request.key, outcome.reason, retry=True))
            return
        call.use.retries += 1
        self._loop.call_at(at, self._enqueue, call)

    def _enqueue(self, call: _Call) -> None:
        if not call.settled:
            self._waiting.append(call)
            self._send_waiting()

    def _expire(self, call: _Call, seconds: float) -> None:
        """The deadline of the call."""
        why = f" ({call.reason})" if call.reason else ""
        self._settle(call, ScoreFailed(call.request.key, f"no answer within {seconds:g} s{why}", retry=True))
        for task, batch in self._requests.items():
            if call in batch and all(other.settled for other in batch):
                task.cancel()

    def _settle(self, call: _Call, answer: Answer) -> None:
        if call.settled:
            return
        call.settled = True
        del self._open[call]
        if call.timer is not None:
            call.timer.cancel()
        call.finish(answer, call.use)

    def _compute_here(self, call: _Call, fallback: Fallback) -> None:
        call.use.fallbacks += 1
        task = self._loop.create_task(self._computed(call, fallback))
        self._computing[task] = None
        task.add_done_callback(self._computing.pop)

    async def _computed(self, call: _Call, fallback: Fallback) -> None:
        async with self._places:
            if not call.settled:  # one that is past its deadline would hold up the others
                self._settle(call, await fallback.answer(call.request))


def _replica_s(done: Exchanged) -> float:
    """Seconds for which the request occupied a replica: as the service reports, else as long as it took.

    One that was turned away occupied none.
    """
    if isinstance(done.outcome, Busy):
        return 0.0
    if isinstance(done.outcome, FunctionResponse):
        # Calls of a batch run side by side, each no longer than the request took.
        reported = sum(min(max(0.0, answer.compute_s), done.seconds) for answer in done.outcome.answers)
        if reported > 0.0:
            return reported
    return done.seconds
