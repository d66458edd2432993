"""A `RemoteClient` on an event loop in a thread of its own, for callers in other threads."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from rollart.backends.rewards.remote_client import Answer, RemoteClient, closed
from rollart.types.messages import ScoreRequest
from rollart.types.reward_use import RewardUse

CLOSE_S = 5.0


class ClientThread:
    """Every call is finished, also one that is made after the end."""

    def __init__(self, name: str, build: Callable[[], RemoteClient]) -> None:
        """`build` is called on the loop; what it raises is raised here."""
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._lock = threading.Lock()
        self._closed = False
        started: Future[RemoteClient] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, started), name=name, daemon=True)
        self._thread.start()
        self._client = started.result()

    def call(self, request: ScoreRequest, body: bytes, finish: Callable[[Answer, RewardUse], None]) -> None:
        """See `RemoteClient.call`; `finish` is called in any thread."""
        with self._lock:
            if not self._closed:  # so the loop sees the call before its end
                self._loop.call_soon_threadsafe(self._client.call, request, body, finish)
                return
        finish(closed(request), RewardUse())

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(CLOSE_S)

    def _run(self, build: Callable[[], RemoteClient], started: "Future[RemoteClient]") -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(build, started))

    async def _serve(self, build: Callable[[], RemoteClient], started: "Future[RemoteClient]") -> None:
        try:
            client = build()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            started.set_exception(error)
            return
        started.set_result(client)
        await self._ending.wait()
        await client.close()
