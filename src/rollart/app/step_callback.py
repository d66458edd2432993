"""The user's callback of the steps: called with the figures of every trained step, and may end the run.

    def watch(step: rollart.StepRecord) -> rollart.Stop | None:
        wandb.log(step.metrics, step=step.step)
        return rollart.Stop("solved") if step.rewards["math"] > 0.95 else None

Invariants: it is called once per trained step, in order, in a thread of its own, so that a slow one delays the next
step and nothing else; `Stop` ends the run after this step as if it were the last, with a checkpoint; an exception ends
the run as `CallbackFailed`. After a crash, steps that are trained again are reported again, and a step that only the
checkpoint has is not reported.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from rollart.observe.steps import StepFold, StepRecord
from rollart.ports.sink import EventSink
from rollart.types.errors import CallbackFailed, RequestError
from rollart.types.journal import JournalEvent


class Stop(msgspec.Struct, frozen=True):
    """Returned by the callback of a step: end the run after it."""

    reason: str = "asked for"


StepCallback = Callable[[StepRecord], Stop | Awaitable[Stop | None] | None]


class StepWatch:
    """EventSink that forwards all events, and calls the callback with the figures of a step."""

    def __init__(self, sink: EventSink, callback: StepCallback) -> None:
        self._sink = sink
        self._fold = StepFold()
        self._callback = callback
        self._name = name_of(callback)

    def append(self, event: JournalEvent) -> None:
        self._sink.append(event)
        self._fold.take(event)

    async def flush(self) -> None:
        await self._sink.flush()

    async def close(self) -> None:
        await self._sink.close()

    def on_step(self, step: int) -> "asyncio.Future[str | None]":
        """Call back for the step that was trained last, whose events have just been appended."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str | None] = loop.create_future()
        (record,) = self._fold.finish()
        assert isinstance(record, StepRecord)

        def call() -> None:
            try:
                answer, error = self._answer(record), None
            except CallbackFailed as failed:
                answer, error = None, failed
            try:
                loop.call_soon_threadsafe(_settle, future, answer, error)
            except RuntimeError:
                return  # the loop is closed: the run ended without waiting for the answer

        threading.Thread(target=call, name=f"on_step {step}", daemon=True).start()
        return future

    def _answer(self, record: StepRecord) -> str | None:
        try:
            answer: Any = self._callback(record)
            if inspect.isawaitable(answer):
                answer = asyncio.run(_awaited(answer))
        except BaseException as error:
            raise CallbackFailed(
                f"on_step {self._name} raised {type(error).__name__} after step {record.step}: {error}"
            ) from error
        if answer is None:
            return None
        if not isinstance(answer, Stop):
            raise CallbackFailed(
                f"on_step {self._name} returned {answer!r} after step {record.step}; return None to go on, or "
                'rollart.Stop("why")'
            )
        return answer.reason


def check_callback(callback: Callable[..., Any]) -> StepCallback:
    """Refuse a callback that cannot be called with one argument."""
    try:
        signature = inspect.signature(callback)
    except ValueError:
        return callback  # some functions of C have no signature
    try:
        signature.bind(None)
    except TypeError as error:
        raise RequestError(
            f"on_step {name_of(callback)} takes {signature}; it is called with one argument, the "
            f"StepRecord of a step ({error})"
        ) from error
    return callback


def name_of(callback: Callable[..., Any]) -> str:
    return str(getattr(callback, "__qualname__", type(callback).__name__))


def _settle(future: "asyncio.Future[str | None]", answer: str | None, error: CallbackFailed | None) -> None:
    if future.done():
        return  # its deadline passed, or the run was cancelled
    if error is None:
        future.set_result(answer)
    else:
        future.set_exception(error)


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer
