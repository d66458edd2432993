"""One engine worker for many clients: admission, turns in flight, and what came back for each.

    begin ──► Add × choices ──► engine (continuous batching; prompts with a common start share KV)
    Generation ◄── parts ◄── Progress, TurnDone, Refused

Invariants:
- A turn that was begun holds one of `capacity` places until the engine has ended it, also after its client has left.
- A generation ends by exactly one door: all choices done, closed by its owner, or failed with the engine or its stop.
- Sessions are not ended here: the engine keeps the KV of past conversations until it needs the room, so the next turn
  of one computes only what is new.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollart.ports.runtime import Runtime
from rollart.types.errors import InvariantBroken, RuntimeLost, WorkerLost
from rollart.types.ids import RequestId, TrajectoryId, WorkerId
from rollart.types.messages import (
    Abort,
    Add,
    EngineInfo,
    FinishReason,
    Progress,
    Refused,
    Role,
    Sampling,
    TurnDone,
    WorkerEvent,
    WorkerInfo,
)
from rollart.types.placement import Node
from rollart.types.tokens import LOGPROB, Generated, Segment

ENGINE = "rollart.backends.engines.torch_engine:TorchEngine"
WORKER = WorkerId("engine/serve/0.0")
SILENT_S = 300.0
"""An engine with requests that reports nothing for this long hangs, and is given up. It reports after every step."""


class Full(Exception):
    """No place is free for the request."""


class NotServed(Exception):
    """The engine refuses the request, or serves none (`lost`)."""

    def __init__(self, reason: str, *, lost: bool = False) -> None:
        super().__init__(reason)
        self.lost = lost


class Part(NamedTuple):
    """What a choice gained. `finish` is set in its last part."""

    choice: int
    tokens: list[int]
    logprobs: list[float]
    finish: FinishReason | None = None
    cached: int = 0
    """Prompt tokens that were not computed again; in the last part."""


class Generation:
    """The choices of one request: an asynchronous iterator over their parts."""

    def __init__(self, engine: "ServingEngine", requests: Sequence[RequestId]) -> None:
        self._engine = engine
        self._requests = requests
        self._left = len(requests)
        self._news: asyncio.Queue[Part | NotServed | None] = asyncio.Queue()
        self.closed = False

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Part:
        """Ends after the last part of all choices, or early if the generation is closed; raises `NotServed`."""
        if self.closed or not self._left:
            raise StopAsyncIteration
        news = await self._news.get()
        if news is None:
            raise StopAsyncIteration
        if isinstance(news, NotServed):
            raise news
        if news.finish is not None:
            self._left -= 1
        return news

    def end(self, choice: int) -> None:
        """Abort one choice; its last part still comes."""
        self._engine.abort(self._requests[choice])

    def close(self) -> None:
        """Abort what is in flight; idempotent."""
        if not self.closed:
            self.closed = True
            self._news.put_nowait(None)
            for request in self._requests:
                self._engine.abort(request)

    def put(self, news: Part | NotServed) -> None:
        if not self.closed:
            self._news.put_nowait(news)


class ServingEngine:
    """Owner of the worker, and its runtime's listener. Make and use it in one event loop."""

    def __init__(self, runtime: Runtime, settings: Mapping[str, Any], *, queue: int, factory: str = ENGINE) -> None:
        """`queue` requests may wait beside those that the engine runs."""
        self._runtime = runtime
        self._settings = settings
        self._factory = factory
        self._queue = queue
        self._numbers = itertools.count(1)
        self._in_flight: dict[RequestId, tuple[Generation, int]] = {}
        self._heard_at = 0.0
        """When the engine last reported, or became busy."""
        self._watching = False
        self._joined: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._info: EngineInfo | None = None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the engine is gone."""
        self._over = ""
        """Why nothing is served any more."""

    # --- life cycle

    async def start(self) -> EngineInfo:
        """Load the model; raises `WorkerLost` if that fails."""
        self._runtime.listen(self)
        self._runtime.spawn(WORKER, Role.ENGINE, self._factory, self._settings)
        self._info = await self._joined
        return self._info

    def stop(self) -> None:
        """Take no more, and fail what is in flight."""
        self._fail_all("The server is stopping")

    async def close(self) -> None:
        await self._runtime.close()

    # --- for requests

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise InvariantBroken("the engine is used before it has joined")
        return self._info

    @property
    def capacity(self) -> int:
        """Turns that run or wait at most."""
        return self.info.slots + self._queue

    @property
    def is_full(self) -> bool:
        return len(self._in_flight) >= self.capacity

    def trouble(self) -> str:
        """Why the engine does not serve; empty if it does."""
        return self._over

    def begin(self, turns: Sequence[tuple[Segment, Sampling]]) -> Generation:
        """Start a choice per turn; raises `Full`, or `NotServed` if the engine has trouble."""
        trouble = self.trouble()
        if trouble:
            raise NotServed(trouble, lost=True)
        if len(self._in_flight) + len(turns) > self.capacity:
            raise Full
        if not self._in_flight:
            self._heard_at = asyncio.get_running_loop().time()
        requests = [RequestId(next(self._numbers)) for _ in turns]
        generation = Generation(self, requests)
        self._in_flight |= {request: (generation, choice) for choice, request in enumerate(requests)}
        if not self._watching:
            self._watch()
        self._runtime.post(
            WORKER,
            [
                Add(request, TrajectoryId(request), "serve", 0, b"", prompt, sampling)
                for request, (prompt, sampling) in zip(requests, turns, strict=True)
            ],
        )
        return generation

    def abort(self, request: RequestId) -> None:
        """Ask the engine to end a turn; no effect on one that has ended."""
        if request in self._in_flight:
            self._runtime.post(WORKER, [Abort(request)])

    def _watch(self) -> None:
        """Look again when the engine might have been silent for too long, as long as it has requests."""
        loop = asyncio.get_running_loop()
        left_s = self._heard_at + SILENT_S - loop.time()
        self._watching = bool(self._in_flight)
        if self._watching and left_s > 0:
            loop.call_later(left_s, self._watch)
        elif self._watching:
            self.died(WORKER, f"it hangs: no report for {SILENT_S:g} s")

    # --- the runtime's listener

    def waits(self, worker: WorkerId, why: str) -> None: ...

    def placed(self, worker: WorkerId, node: str, why: str) -> None: ...

    def leaves(self, worker: WorkerId, why: str) -> None: ...

    def nodes_seen(self, nodes: Sequence[Node]) -> None: ...

    def joined(self, worker: WorkerId, info: WorkerInfo) -> None:  # noqa: ARG002
        assert isinstance(info, EngineInfo)
        self._joined.set_result(info)

    def events(self, worker: WorkerId, events: Sequence[WorkerEvent]) -> None:  # noqa: ARG002
        if self.lost.done():
            return  # it was given up
        self._heard_at = asyncio.get_running_loop().time()
        for event in events:
            match event:
                case Progress(parts):
                    for request, generated in parts:
                        generation, choice = self._in_flight[request]
                        generation.put(_part(choice, generated))
                case TurnDone(request, generated, finish, usage):
                    generation, choice = self._in_flight.pop(request)
                    generation.put(_part(choice, generated, finish, usage.cached))
                case Refused(request, reason):
                    generation, _ = self._in_flight.pop(request)
                    generation.put(NotServed(reason))
                case _:
                    raise InvariantBroken(f"an engine without sessions to miss or versions to stage reports {event}")

    def died(self, worker: WorkerId, reason: str) -> None:  # noqa: ARG002
        if self.lost.done():
            return
        self.lost.set_result(reason)
        if not self._joined.done():
            self._joined.set_exception(WorkerLost(f"the engine could not be started: {reason}"))
        self._fail_all("The engine has failed")
        self._in_flight.clear()

    def failed(self, error: RuntimeLost) -> None:
        self.died(WORKER, str(error))

    def _fail_all(self, why: str) -> None:
        self._over = why
        for generation, _ in self._in_flight.values():
            generation.put(NotServed(why, lost=True))


def _part(choice: int, generated: Generated, finish: FinishReason | None = None, cached: int = 0) -> Part:
    logprobs = np.frombuffer(generated.logprobs or b"", dtype=LOGPROB)
    return Part(choice, generated.tokens.ids().tolist(), logprobs.tolist(), finish, cached)
