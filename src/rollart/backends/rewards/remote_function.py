"""A function behind a URL as a Python callable: what `register_serverless` puts in the place of an attribute.

    >>> judge = RemoteFunction("https://fn.example/judge", secret="JUDGE_SECRET")      # doctest: +SKIP
    >>> judge(transcript), judge([one, other])                                         # doctest: +SKIP
    (0.5, [0.0, 1.0])

A transcript gives a number, a list of them a list: each is a call of its own, all at once, unless `group` says that the
function compares them. Retries, hedging and back-pressure are those of `remote_client`. Thread-safe.
"""

import itertools
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

from rollart.backends.rewards.remote_client import RemoteClient, RemoteLimits
from rollart.backends.rewards.remote_exchange import RemoteExchange
from rollart.backends.rewards.remote_secret import RemoteSecret
from rollart.backends.rewards.remote_thread import ClientThread
from rollart.backends.rewards.shell import Answer
from rollart.config.reward_place import REMOTE_SLOTS
from rollart.types.errors import RewardFault
from rollart.types.failures import FailureKind
from rollart.types.messages import EpisodeRecord, Scored, ScoreRequest
from rollart.types.reward_use import RewardUse
from rollart.types.reward_wire import FunctionCall
from rollart.types.transcript import Transcript


class RemoteFunction:
    """See the module."""

    def __init__(
        self,
        url: str,
        *,
        secret: str = "",
        secret_as: str = "bearer",
        group: bool = False,
        deadline_s: float = 120.0,
        slots: int = REMOTE_SLOTS,
    ) -> None:
        """`secret` is the name of an environment variable. An answer takes at most `deadline_s`."""
        self._url = url
        self._secret = RemoteSecret(secret, secret_as)
        self._group = group
        self._deadline_s = deadline_s
        self._slots = slots
        self._name = secrets.token_hex(8)
        self._numbers = itertools.count()
        self.use = RewardUse()
        """What all calls so far have taken."""
        self._lock = threading.Lock()
        self._client = ClientThread("remote function", self._build)

    def __call__(self, given: Transcript | Sequence[Transcript]) -> float | list[float]:
        """The rewards; raises `RewardFault` if one cannot be had."""
        if isinstance(given, Transcript):
            return self._started([given]).result()[0]
        if not given:
            return []
        if self._group:
            return list(self._started(list(given)).result())
        return [call.result()[0] for call in [self._started([each]) for each in given]]

    def close(self) -> None:
        """Calls that are open fail."""
        self._client.close()

    def _started(self, transcripts: list[Transcript]) -> "Future[tuple[float, ...]]":
        key = f"{self._name}/{next(self._numbers)}"
        episodes = tuple([EpisodeRecord(each.trajectory, each.seed) for each in transcripts])
        request = ScoreRequest(key, transcripts[0].task, "", episodes, self._deadline_s)
        body = msgspec.json.encode(FunctionCall(key, tuple(transcripts)))
        done: Future[tuple[float, ...]] = Future()

        def finish(answer: Answer, use: RewardUse) -> None:
            with self._lock:
                self.use.add(use)
                self.use.calls += 1
            if isinstance(answer, Scored):
                done.set_result(answer.values)
            else:
                done.set_exception(RewardFault(answer.reason, FailureKind.ERROR))

        self._client.call(request, body, finish)
        return done

    def _spent(self, _: str, use: RewardUse) -> None:
        with self._lock:
            self.use.add(use)

    def _build(self) -> RemoteClient:
        exchange = RemoteExchange(self._url, self._secret, connections=2 * self._slots)
        return RemoteClient(exchange, RemoteLimits(self._slots), self._spent)
