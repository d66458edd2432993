"""Reward worker whose function runs in replicas: processes of this machine, or actors of a cluster.

    request ──► thread of a slot ──► its replica, started at the first request and after every kill
                                ◄── answer; or nothing until the deadline: the replica is killed

So a function that hangs, holds the interpreter lock or crashes costs its own call, and the pool is whole again. The
start of a replica has a limit of its own: one that starts too late for its call is kept for the next.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from pydantic import ConfigDict, Field

from rollart.backends.rewards.child_replica import ChildReplicas
from rollart.backends.rewards.replica import decode, encode
from rollart.backends.rewards.shell import Answer, RewardShell
from rollart.config.base import Strict
from rollart.config.reward_place import LOCAL_SLOTS
from rollart.ports.replicas import START_S, Replica, ReplicaLate, ReplicaLost, ReplicaOrder
from rollart.types.messages import RewardInfo, ScoreFailed, ScoreRequest
from rollart.types.reward_use import RewardUse

BODY = "rollart.backends.rewards.replica:function_replica"
CLOSE_S = 5.0


class ReplicaHostSettings(Strict):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    function: str
    slots: int = Field(default=LOCAL_SLOTS, ge=1)
    """Maximum number of replicas."""
    starter: Any = None
    """`ReplicaStarter`; child processes by default."""
    price: float = 0.0
    rewards: tuple[str, ...] = ()


class ReplicaHost(RewardShell):
    """A reward worker; its factory path is `rollart.backends.rewards.replica_host:ReplicaHost`."""

    def __init__(self, settings: Mapping[str, Any], wake: Callable[[], None]) -> None:
        chosen = ReplicaHostSettings.model_validate(dict(settings))
        super().__init__(RewardInfo(slots=chosen.slots, rewards=chosen.rewards), chosen.price, wake)
        self._function = chosen.function
        self._limit = chosen.slots
        self._starter = chosen.starter or ChildReplicas()
        self._requests: queue.SimpleQueue[tuple[ScoreRequest, float] | None] = queue.SimpleQueue()
        self._slots: list[_Slot] = []

    def close(self) -> None:
        for slot in self._slots:
            slot.closed = True
            self._requests.put(None)
        for slot in self._slots:
            slot.end()
        for slot in self._slots:
            slot.thread.join(CLOSE_S)

    def _start(self, request: ScoreRequest) -> None:
        self._requests.put((request, time.monotonic()))
        if len(self._slots) < min(self._pending, self._limit):
            order = ReplicaOrder(BODY, self._function, len(self._slots))
            slot = _Slot(order, self._starter.start, self._requests, self.finish)
            self._slots.append(slot)
            slot.thread.start()


class _Slot:
    """A thread with at most one replica."""

    def __init__(
        self,
        order: ReplicaOrder,
        start: Callable[[ReplicaOrder], Replica],
        requests: "queue.SimpleQueue[tuple[ScoreRequest, float] | None]",
        finish: Callable[[ScoreRequest, Answer, RewardUse], None],
    ) -> None:
        self._order = order
        self._start = start
        self._requests = requests
        self._finish = finish
        self._lock = threading.Lock()
        self._replica: Replica | None = None
        self.closed = False
        self.thread = threading.Thread(target=self._run, name=f"replica {order.number}", daemon=True)

    def end(self) -> None:
        """End the replica, also in the middle of a call."""
        with self._lock:
            if self._replica is not None:
                self._replica.kill()

    def _run(self) -> None:
        while (asked := self._requests.get()) is not None and not self.closed:
            request, came_at = asked
            use = RewardUse()
            began = time.monotonic()
            answer = self._answer(request, came_at + (request.deadline_s or math.inf), use)
            use.replica_s = time.monotonic() - began
            self._finish(request, answer, use)
        self.end()

    def _answer(self, request: ScoreRequest, deadline: float, use: RewardUse) -> Answer:
        try:
            replica = self._started(use)
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                return ScoreFailed(
                    request.key, "no replica was ready before its deadline; raise deadline_s", retry=True
                )
            return decode(replica.call(encode(request), left_s))
        except ReplicaLate:
            use.kills += 1
            self._drop()
            reason = f"the function took longer than {request.deadline_s:g} s and its replica was killed"
            return ScoreFailed(request.key, reason, retry=True)
        except ReplicaLost as error:
            self._drop()
            return ScoreFailed(request.key, str(error), retry=True)
        except (ValueError, msgspec.MsgspecError) as error:
            self._drop()
            return ScoreFailed(request.key, f"its replica answered something else: {error}", retry=True)
        except Exception as error:  # noqa: BLE001 - without this thread, the slot would hold its requests for ever
            self._drop()
            return ScoreFailed(request.key, f"its replica failed: {type(error).__name__}: {error}", retry=True)

    def _started(self, use: RewardUse) -> Replica:
        if self._replica is None:
            use.cold_starts += 1
            replica = self._start(self._order)
            with self._lock:
                self._replica = replica
            if self.closed:
                self.end()
            replica.wait_until_ready(START_S)
        assert self._replica is not None
        return self._replica

    def _drop(self) -> None:
        self.end()
        with self._lock:
            self._replica = None
