"""Reward worker for a function behind a URL.

    advance, in the worker's thread: transcripts become JSON ──► loop of `RemoteClient`, in a thread of its own
                                                       finish ◄──

What is sent when, and what becomes of it: `remote_client`. The wire format: `types.reward_wire`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import msgspec
from pydantic import Field

from rollart.backends.rewards.remote_client import Fallback, RemoteClient, RemoteLimits
from rollart.backends.rewards.remote_exchange import RemoteExchange
from rollart.backends.rewards.remote_secret import RemoteSecret
from rollart.backends.rewards.remote_thread import ClientThread
from rollart.backends.rewards.scorer import Scorer, transcripts_of, unreadable
from rollart.backends.rewards.shell import RewardShell
from rollart.config.base import Strict
from rollart.config.reward_place import LOCAL_SLOTS, REMOTE_SLOTS
from rollart.ports.daemon_threads import DaemonThreads
from rollart.types.messages import RewardInfo, ScoreRequest
from rollart.types.reward_use import RewardUse
from rollart.types.reward_wire import FunctionCall


class RemoteHostSettings(Strict):
    url: str
    function: str = ""
    """Path of the function that is behind the URL, if it is known here; `fallback` needs it."""
    slots: int = Field(default=REMOTE_SLOTS, ge=1)
    """Maximum number of concurrent requests, hedges aside."""
    batch: int = Field(default=1, ge=1)
    hedge: bool = True
    fallback: bool = False
    secret: str = ""
    secret_as: Literal["bearer", "signature"] = "bearer"
    price: float = 0.0
    rewards: tuple[str, ...] = ()


class RemoteHost(RewardShell):
    """A reward worker; its factory path is `rollart.backends.rewards.remote_host:RemoteHost`."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:
        chosen = RemoteHostSettings.model_validate(dict(settings))
        # More calls than requests: those that wait here are what batches are made of.
        info = RewardInfo(slots=chosen.slots * chosen.batch, elastic=True, rewards=chosen.rewards)
        super().__init__(info, chosen.price, wake)
        self._settings = chosen
        self._secret = RemoteSecret(chosen.secret, chosen.secret_as)
        self._threads = DaemonThreads()
        self._fallback = None
        if chosen.fallback:
            self._fallback = Fallback(partial(self._threads.run, Scorer(chosen.function).answer), LOCAL_SLOTS)
        self._client = ClientThread("remote reward", self._build)

    def close(self) -> None:
        self._client.close()
        self._threads.close()

    def _start(self, request: ScoreRequest) -> None:
        try:
            transcripts = transcripts_of(self._settings.function, request.episodes)
            body = msgspec.json.encode(FunctionCall(request.key, tuple(transcripts)))
        except ValueError as error:
            self.finish(request, unreadable(request, error), RewardUse())
            return
        self._client.call(request, body, lambda answer, use: self.finish(request, answer, use))

    def _build(self) -> RemoteClient:
        chosen = self._settings
        exchange = RemoteExchange(chosen.url, self._secret, connections=2 * chosen.slots)
        limits = RemoteLimits(chosen.slots, chosen.batch, chosen.hedge)
        return RemoteClient(exchange, limits, self.used, self._fallback)
