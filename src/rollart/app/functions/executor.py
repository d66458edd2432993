"""Executors: where a served reward function runs. In threads or on the loop of this process, or elsewhere."""

import asyncio
import logging
import os
import secrets
import time
import traceback
from typing import NamedTuple, Protocol

import msgspec

from rollart.ports.daemon_threads import DaemonThreads
from rollart.ports.reward import RewardKind
from rollart.ports.reward_call import MAX_ERROR_CHARACTERS, BadReward, RewardCaller, Rewards, shown
from rollart.types.errors import WRONG_CODE
from rollart.types.reward_wire import FunctionAnswer, FunctionCall

log = logging.getLogger(__name__)
MAX_ANSWER_BYTES = 256 * 2**10


class Executed(NamedTuple):
    """Answer of one call, and the instance that computed it."""

    answer: FunctionAnswer
    instance: str
    cold: bool


class Executor(Protocol):
    """Runs calls of one reward function. A failure of the function is an answer, never an exception."""

    path: str
    kind: RewardKind
    concurrency: int
    """Number of concurrent calls."""
    queue: int
    """Number of calls that may wait; more are refused."""
    can_stop: bool
    """Whether a call ends when `run` is cancelled. Another one finishes, and its answer is remembered."""

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
