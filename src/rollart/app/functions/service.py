"""Service of one reward function: which calls run, which are repeated, which are refused. Shared by all targets.

Invariants: a call runs once at a time however often it is requested, and not again while its answer is remembered; at
most `concurrency` calls run; a request is accepted if there is room for one call, running or in the `queue`, and else
refused with 429. A call without a waiting client is stopped where the executor can, and else keeps its slot until it
ends.
"""

import asyncio
from collections.abc import Callable

from rollart.app.functions.executor import Executed, Executor, failure
from rollart.gateway.functions.answers import busy, deadline_passed
from rollart.gateway.functions.memory import Memory, identity
from rollart.types.reward_wire import FunctionAnswer, FunctionCall, FunctionRequest, FunctionResponse

RETRY_AFTER_S = 1


class Call:
    """A call that runs or waits for its slot."""

    def __init__(self, start: "Callable[[Call], asyncio.Task[Executed]]") -> None:
        self.requests = 0
        """Requests that wait for it."""
        self.has_slot = False
        self.task = start(self)

    def result(self, call: FunctionCall) -> FunctionAnswer | None:
        """None while it runs."""
        if not self.task.done():
            return None
        if self.task.cancelled():
            return failure(call, "the function was cancelled", retry=True)
        return self.task.result().answer


class FunctionService:
    """Use it on one event loop."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._memory = Memory()
        self._running: dict[bytes, Call] = {}
        self._slots = asyncio.Semaphore(executor.concurrency)

    @property
    def is_stuck(self) -> bool:
        """Whether every slot is held by a call without a waiting client."""
        held = [call for call in self._running.values() if call.has_slot]
        return len(held) >= self.executor.concurrency and not any(call.requests for call in held)

    async def start(self) -> None:
        await self.executor.start()

    async def answer(self, request: FunctionRequest) -> FunctionResponse:
        """Answers in the order of the calls; those that missed the deadline are errors to retry."""
        deadline_s = request.deadline_s
        ids = [identity(call) for call in request.calls]
        remembered = [self._memory.recall(each) for each in ids]
        new = [each for each, known in zip(ids, remembered, strict=True) if not known and each not in self._running]
        if new and len(self._running) >= self.executor.concurrency + self.executor.queue:
            raise busy(RETRY_AFTER_S)
        asked = {each: call for each, call, known in zip(ids, request.calls, remembered, strict=True) if not known}
        joined = {each: self._join(each, call) for each, call in asked.items()}
        try:
            if joined:
                await asyncio.wait([call.task for call in joined.values()], timeout=deadline_s)
            results = [
                known or joined[each].result(call)
                for each, call, known in zip(ids, request.calls, remembered, strict=True)
            ]
        finally:
            for call in joined.values():
                self._leave(call)
        if not any(results):
            raise deadline_passed(deadline_s)
        late = f"it did not finish within {deadline_s:g} s"
        answers = [
            result or failure(call, late, retry=True) for call, result in zip(request.calls, results, strict=True)
        ]
        return self._response(answers, [call for call in joined.values() if call.task.done()])

    async def close(self) -> None:
        for call in self._running.values():
            call.task.cancel()
        await asyncio.gather(*(call.task for call in self._running.values()), return_exceptions=True)
        await self.executor.close()

    def _join(self, key: bytes, call: FunctionCall) -> Call:
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = Call(lambda started: asyncio.create_task(self._run(started, key, call)))
        running.requests += 1
        return running

    def _leave(self, call: Call) -> None:
        call.requests -= 1
        if not call.requests and not call.task.done() and (self.executor.can_stop or not call.has_slot):
            call.task.cancel()

    async def _run(self, running: Call, key: bytes, call: FunctionCall) -> Executed:
        try:
            async with self._slots:
                running.has_slot = True
                executed = await self.executor.run(call)
        finally:
            del self._running[key]
        self._memory.remember(key, executed.answer)
        return executed

    @staticmethod
    def _response(answers: list[FunctionAnswer], ended: list[Call]) -> FunctionResponse:
        executed = [call.task.result() for call in ended if not call.task.cancelled()]
        return FunctionResponse(
            answers=tuple(answers),
            instance=executed[0].instance if executed else "",
            cold=any(each.cold for each in executed),
        )
