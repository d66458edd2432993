"""Executors: where a served reward function runs. In threads or on the loop of this process, or elsewhere."""

import asyncio
import logging
import os
import queue
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from rollart.ports.reward import RewardKind
from rollart.ports.reward_call import MAX_ERROR_CHARACTERS, BadReward, RewardCaller, Rewards, shown
from rollart.types.errors import WRONG_CODE
from rollart.types.reward_wire import FunctionAnswer, FunctionCall
from rollart.types.transcript import Transcript

log = logging.getLogger(__name__)
MAX_ANSWER_BYTES = 256 * 2**10


class Executed(NamedTuple):
    """The answer of one call, and who gave it."""

    answer: FunctionAnswer
    instance: str
    cold: bool


class Executor(Protocol):
    """Runs calls of one reward function. A failure of the function is an answer, never an exception."""

    path: str
    kind: RewardKind
    concurrency: int
    """Calls that run at once."""
    queue: int
    """Calls that may wait for them; more are refused."""
    can_stop: bool
    """Whether a call ends when `run` is cancelled. Others are left alone: they finish, and are remembered."""

    async def start(self) -> None:
        """Called on the event loop before the first call."""
        ...

    async def run(self, call: FunctionCall) -> Executed: ...

    def report(self) -> dict[str, float]:
        """Figures for `/health`."""
        ...

    async def close(self) -> None: ...


class LocalExecutor:
    """The function in this process: one that is async on the event loop, any other in threads."""

    def __init__(self, path: str, concurrency: int) -> None:
        self._caller = RewardCaller(path)
        self.path = path
        self.kind = self._caller.kind
        self.concurrency = concurrency
        self.queue = 0
        self.can_stop = self._caller.is_async
        self._threads = DaemonThreads()
        self._instance = ""
        self._process = 0

    async def start(self) -> None:
        pass

    def report(self) -> dict[str, float]:
        return {}

    async def run(self, call: FunctionCall) -> Executed:
        cold = self._process != os.getpid()  # not when it was built: servers fork afterwards
        if cold:
            self._process, self._instance = os.getpid(), secrets.token_hex(4)
        started = time.monotonic()
        answer = await self._attempt(call)
        elapsed = round(time.monotonic() - started, 6)
        return Executed(msgspec.structs.replace(answer, compute_s=elapsed), self._instance, cold)

    async def close(self) -> None:
        self._threads.close()

    async def _attempt(self, call: FunctionCall) -> FunctionAnswer:
        try:
            if self._caller.is_async:
                rewards = await self._caller.score_on_loop(call.transcripts)
            else:
                rewards = await self._threads.run(self._caller.score, call.transcripts)
        except BadReward as error:
            return failure(call, shown(error), retry=False)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - the boundary of user code: its errors are answers
            # As text that any log can hold: messages of errors may contain half of a surrogate pair.
            trace = traceback.format_exc().encode("utf-8", "backslashreplace").decode()
            log.error("the reward function %s failed on %s\n%s", self.path, call.key, trace)
            return failure(call, f"{type(error).__name__}: {shown(error)}", retry=not isinstance(error, WRONG_CODE))
        return success(call, rewards)


def success(call: FunctionCall, rewards: Rewards) -> FunctionAnswer:
    answer = FunctionAnswer(call.key, rewards.values, rewards.parts)
    size = len(msgspec.json.encode(answer))
    if size > MAX_ANSWER_BYTES:
        return failure(call, f"the rewards have {size} bytes, more than {MAX_ANSWER_BYTES}", retry=False)
    return answer


def failure(call: FunctionCall, error: str, *, retry: bool) -> FunctionAnswer:
    error = error[:MAX_ERROR_CHARACTERS].encode(errors="replace").decode()
    return FunctionAnswer(call.key, error=error, retry=retry)


class DaemonThreads:
    """Threads that start when needed, are reused, and do not keep the process when a function hangs.

    Each has an event loop of its own, for functions that return something to await.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[..., Any], asyncio.Future[Rewards], Any] | None]
        self._jobs = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._busy = 0

    async def run(
        self, function: Callable[[Sequence[Transcript], asyncio.Runner], Rewards], transcripts: Sequence[Transcript]
    ) -> Rewards:
        """Call the function in a thread."""
        future: asyncio.Future[Rewards] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._busy += 1
            if self._busy > self._threads:
                self._threads += 1
                threading.Thread(target=self._work, name=f"reward:{self._threads}", daemon=True).start()
        self._jobs.put((function, future, transcripts))
        return await future

    def close(self) -> None:
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        with asyncio.Runner() as runner:
            while (job := self._jobs.get()) is not None:
                function, future, transcripts = job
                result: Any = None
                problem: BaseException | None = None
                try:
                    result = function(transcripts, runner)
                except BaseException as error:  # noqa: BLE001 - user code: raised again where it is awaited
                    problem = error
                with self._lock:
                    self._busy -= 1
                loop = future.get_loop()
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_settle, future, result, problem)


def _settle(future: "asyncio.Future[Rewards]", result: Any, problem: BaseException | None) -> None:
    if future.done():
        return
    if problem is None:
        future.set_result(result)
    elif isinstance(problem, StopIteration | asyncio.CancelledError | KeyboardInterrupt | SystemExit):
        # What a future cannot carry, or the loop would take for its own.
        future.set_exception(RuntimeError(f"{type(problem).__name__}: {shown(problem)}"))
    else:
        future.set_exception(problem)
