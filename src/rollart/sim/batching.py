"""Continuous batching without a loop over tokens: prefill work, then a token clock.

Every running request gets one token per decode step, so one counter, the clock, serves all of them: a request that
joins at clock D with n tokens to go ends at D + n. Between two changes of the batch, steps differ only in KV size,
which grows by one token per request and step; a stretch of steps is timed by its midpoint, which is exact as long as
one side of the roofline binds. Prefill has priority: while any prefill work is left, the clock stands still.

    now ──► prefill work of all that joined ──► steps of the clock ──► the next request ends
            (first in, first out)               (whole steps only)     = `end`, the only timer

Interrupting a stretch neither loses nor gains work: whole steps count as tokens, and the time spent in the interrupted
step is credited to the next stretch.

A request's share of the steps is the difference of two readings of one meter, `share_s`, which grows with every step
by its seconds divided by its batch: no loop over requests here either.
"""

import math
from array import array
from bisect import bisect_left

from rollart.sim.hardware import Roofline
from rollart.sim.kvcache import Session
from rollart.types.ids import RequestId, TrajectoryId
from rollart.types.messages import Add, FinishReason
from rollart.types.tokens import Generated, Segment, VersionRun
from rollart.types.versions import Version

NO_TOKENS = Generated(Segment(0, None), None, ())


class Request:
    """One turn: queued, then in the batch, then ended.

    `context` prompt tokens are followed by `length` sampled ones, of which `reported` have been reported.
    """

    __slots__ = (
        "cached",
        "computed",
        "computed_s",
        "context",
        "counted",
        "end",
        "ended",
        "finish",
        "held",
        "id",
        "length",
        "prefix",
        "recomputed",
        "reported",
        "run_from",
        "runs",
        "session",
        "session_id",
        "share_s",
        "share_steps",
        "task",
        "work_left_s",
        "work_s",
        "work_tokens",
    )

    def __init__(self, add: Add, context: int, length: int, finish: FinishReason) -> None:
        # The message itself is not kept: requests in flight are most of a large simulation's memory.
        self.id: RequestId = add.request
        self.session_id: TrajectoryId = add.session
        self.task: str = add.task
        self.prefix = add.prefix_length
        self.context = context
        self.length = length
        self.finish = finish
        self.session: Session | None = None
        self.ended = False
        self.end = 0
        self.cached = 0
        self.recomputed = 0
        # Prefill work: `work_tokens` to compute after `held` tokens with KV, and the seconds of it that are left.
        self.held = 0
        self.work_tokens = 0
        self.work_s = 0.0
        self.work_left_s = 0.0
        # Work not accounted for yet: prefill, and decoding since these readings of the meters of the batch.
        self.computed = 0
        self.computed_s = 0.0
        self.counted = 0
        self.share_s = 0.0
        self.share_steps = 0.0
        # Sampled but not reported yet: closed runs, and an open one from token `run_from` on.
        self.reported = 0
        self.run_from = 0
        self.runs: tuple[VersionRun, ...] = ()

    @property
    def need(self) -> int:
        """KV tokens held at its end."""
        return self.context + self.length

    def sampled(self, clock: int) -> int:
        return self.length - self.end + clock

    def drop_work(self) -> None:
        """Cancel its remaining prefill work."""
        self.computed -= int(self.work_tokens * self.work_left_s / self.work_s)
        self.computed_s -= self.work_left_s

    def close_run(self, clock: int, version: Version) -> None:
        """Record that the tokens sampled so far have `version`, because it is about to change."""
        sampled = self.sampled(clock)
        if sampled > self.run_from:
            self.runs = (*self.runs, VersionRun(version, sampled - self.run_from))
            self.run_from = sampled

    def take(self, sampled: int, version: Version) -> Generated:
        """Unreported part of the first `sampled` tokens; marks it as reported."""
        count = sampled - self.reported
        if not count:
            return NO_TOKENS
        runs = self.runs
        if sampled > self.run_from:
            runs = (*runs, VersionRun(version, sampled - self.run_from))
        self.reported = self.run_from = sampled
        self.runs = ()
        return Generated(Segment(count, None), None, runs)


class Batch:
    """The running requests of an engine. After every change and every `settle`, `plan` must recompute `end`.

    Requests are sorted by end, the next one last; among equal ends, the one that joined first is last. Negated ends are
    kept in a parallel array, so a binary search touches no request object: a large simulation is bound by memory
    access.
    """

    __slots__ = (
        "_at",
        "_decode_factor",
        "_decode_step_s",
        "_ends",
        "_kv_tokens",
        "_prefill_factor",
        "_prefill_s",
        "_requests",
        "_spent_s",
        "_step_s",
        "_steps",
        "_work",
        "_work_s",
        "clock",
        "end",
        "running",
        "share_s",
        "share_steps",
        "size",
    )

    def __init__(self, roofline: Roofline) -> None:
        self.clock = 0
        self.size = 0
        self.end = math.inf
        """When the next request ends if nothing changes."""
        self.running = True
        self.share_s = 0.0
        """Seconds of steps so far, each divided by its batch."""
        self.share_steps = 0.0
        """The same with 1 for every step."""
        self._prefill_factor = self._decode_factor = 1.0
        self._prefill_s = roofline.prefill_s
        self._decode_step_s = roofline.decode_step_s
        self._at = 0.0
        self._kv_tokens = 0
        self._requests: list[Request] = []
        self._ends = array("q")
        self._work: list[Request] = []
        self._work_s = 0.0
        self._steps = 0
        self._step_s = 1.0
        self._spent_s = 0.0

    @property
    def kv_tokens(self) -> int:
        """Total tokens that the running requests attend to."""
        return self._kv_tokens

    def requests(self) -> list[Request]:
        """All running requests in the order in which they joined, which is that of their ids."""
        return sorted(self._requests, key=lambda request: request.id)

    def find(self, id: RequestId) -> Request | None:
        return next((request for request in self._requests if request.id == id), None)

    def slow(self, prefill: float, decode: float) -> None:
        """Scale the duration of later prompts and steps; prompts already begun keep theirs. Call `settle` before and
        `plan` after."""
        self._prefill_factor, self._decode_factor = prefill, decode

    def join(self, request: Request, held: int) -> None:
        """Start a request; KV of the first `held` tokens of its context exists."""
        request.share_s, request.share_steps = self.share_s, self.share_steps
        self._assign(request, request.context - held, held)
        request.end = end = self.clock + request.length
        place = bisect_left(self._ends, -end)
        self._ends.insert(place, -end)
        self._requests.insert(place, request)
        self.size += 1
        self._kv_tokens += request.context

    def leave(self, request: Request) -> None:
        """Remove a request before its end. Its prefill work is dropped; `work_left_s` still holds what was
        left of it."""
        request.ended = True
        place = self._requests.index(request)
        del self._requests[place], self._ends[place]
        self._kv_tokens -= request.context + request.sampled(self.clock)
        self._work_s = max(0.0, self._work_s - request.work_left_s)
        self._shrink(1)

    def recompute(self) -> None:
        """Invalidate the KV of all running requests: it is recomputed before the next step."""
        self._work.clear()
        self._work_s = 0.0
        for request in self.requests():
            whole = request.context + request.sampled(self.clock)
            if request.work_left_s > 0.0:
                share = 1.0 - request.work_left_s / request.work_s
                request.recomputed += request.held + int(request.work_tokens * share)
                request.drop_work()
            else:
                request.recomputed += whole
            self._assign(request, whole, 0)

    def settle(self, now: float) -> None:
        """Account for the time until `now`, which is before `end`: whole steps become tokens."""
        elapsed_s = now - self._at
        self._at = now
        if elapsed_s <= 0.0 or not self.size or not self.running:
            return
        if self._work:
            if elapsed_s < self._work_s:
                self._pay(elapsed_s)
                return
            elapsed_s -= self._work_s
            self._work_done()
        steps = self._whole_steps(elapsed_s)
        spent_s = self._spent_s + elapsed_s - steps * self._step_s
        self._spent_s = spent_s if spent_s > 0.0 else 0.0
        self.clock += steps
        self._kv_tokens += steps * self.size
        self._share(steps)

    def clock_at(self, now: float) -> int:
        """The clock at `now`, which is before `end`; no side effects."""
        elapsed_s = now - self._at
        if elapsed_s <= 0.0 or not self.size or not self.running or elapsed_s < self._work_s:
            return self.clock
        return self.clock + self._whole_steps(elapsed_s - self._work_s)

    def complete(self) -> list[Request]:
        """Advance to `end` and remove the requests that end there, in the order in which they joined."""
        self._at = self.end
        if self._work:
            self._work_done()
        self.clock += self._steps
        self._kv_tokens += self._steps * self.size
        self._share(self._steps)
        self._spent_s = 0.0
        ends, clock = self._ends, self.clock
        done: list[Request] = []
        while ends and -ends[-1] <= clock:
            ends.pop()
            request = self._requests.pop()
            request.ended = True
            self._kv_tokens -= request.context + request.length
            done.append(request)
        self._shrink(len(done))
        return done

    def plan(self) -> None:
        if not self.size or not self.running:
            self.end = math.inf
            return
        self._steps = steps = -self._ends[-1] - self.clock
        kv_tokens = self._kv_tokens + 0.5 * (steps - 1) * self.size
        self._step_s = step_s = self._decode_factor * self._decode_step_s(self.size, kv_tokens)
        left_s = steps * step_s - self._spent_s
        self.end = self._at + self._work_s + (left_s if left_s > 0.0 else 0.0)

    def _whole_steps(self, elapsed_s: float) -> int:
        # The last step of the stretch belongs to `complete`: rounding must not end a request before its timer.
        steps = int((self._spent_s + elapsed_s) / self._step_s)
        return steps if steps < self._steps else self._steps - 1

    def _assign(self, request: Request, tokens: int, held: int) -> None:
        request.held = held
        request.work_tokens = tokens
        request.work_s = request.work_left_s = work_s = self._prefill_factor * self._prefill_s(tokens, held)
        request.computed += tokens
        request.computed_s += work_s
        self._work.append(request)
        self._work_s += work_s

    def _pay(self, seconds: float) -> None:
        """Spend time on prefill work, first in, first out."""
        self._work_s -= seconds
        for paid, request in enumerate(self._work):
            if request.ended:
                continue
            if request.work_left_s > seconds:
                request.work_left_s -= seconds
                del self._work[:paid]
                return
            seconds -= request.work_left_s
            request.work_left_s = 0.0
        self._work.clear()
        self._work_s = 0.0

    def _work_done(self) -> None:
        for request in self._work:
            request.work_left_s = 0.0
        self._work.clear()
        self._work_s = 0.0

    def _share(self, steps: int) -> None:
        self.share_s += steps * self._step_s / self.size
        self.share_steps += steps / self.size

    def _shrink(self, count: int) -> None:
        self.size -= count
        if not self.size:
            # No request is left that an interrupted step or a rounding error of the work could belong to.
            self._work.clear()
            self._work_s = 0.0
            self._spent_s = 0.0
