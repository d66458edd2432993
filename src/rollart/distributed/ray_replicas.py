"""Replicas of a reward function as Ray actors, on any nodes: each a `Cluster` of one rank that the reward worker makes.

Replicas are actors of the worker and end with it. They reserve room if the worker has reserved some; on the private Ray
of one machine nothing is reserved. Their logs lie beside that of the worker, `<worker>.replica-<number>.log`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from rollart.distributed.cluster import Cluster
from rollart.distributed.ray_process import Order, own_process, prepare_process
from rollart.distributed.worker import Worker, register
from rollart.ports.factory import load
from rollart.ports.replicas import START_S, ReplicaBody, ReplicaLate, ReplicaLost, ReplicaOrder
from rollart.types.errors import RankError, RequestError
from rollart.types.placement import NOTHING, Needs

PLACE_S = 60.0
"""How long a replica may wait for a node; its call is asked for again afterwards."""


@dataclass(frozen=True)
class RayReplicas:
    """Starts replicas as Ray actors (`ports.replicas.ReplicaStarter`)."""

    needs: Needs = NOTHING
    """What one replica reserves."""

    def start(self, order: ReplicaOrder) -> "RayReplica":
        return RayReplica(order, self.needs)


class RemoteReplica(Worker):
    """The process of a replica: hosts its body."""

    def __init__(self, body: str, function: str) -> None:
        self._answer = cast("Callable[[str], ReplicaBody]", load(body))(function)

    @register(mode="execute_rank_zero")
    def answer(self, request: bytes) -> bytes:
        return self._answer(request)


class RayReplica:
    """One actor (`ports.replicas.Replica`)."""

    def __init__(self, order: ReplicaOrder, needs: Needs) -> None:
        own = own_process()
        name = f"replica-{order.number}"
        log = "" if own is None else str(Path(own.order.log).with_suffix(f".{name}.log"))
        try:
            self._cluster = Cluster(
                RemoteReplica,
                1,
                order.body,
                order.function,
                needs=needs if own is not None and own.reserved else None,
                place_s=PLACE_S,
                start_s=START_S,
                prepare=None if own is None else partial(_prepare, own.order_for_others(), log, name),
                log=log,
            )
        except (RankError, RequestError, TimeoutError) as error:
            raise ReplicaLost(f"no replica could be started: {error}") from error

    def wait_until_ready(self, limit_s: float) -> None:
        """It is, since it was made."""

    def call(self, request: bytes, limit_s: float) -> bytes:
        try:
            answer: bytes = self._cluster.answer.start(request).result(None if limit_s == math.inf else limit_s)
        except TimeoutError:
            raise ReplicaLate from None
        except RankError as error:
            raise ReplicaLost(str(error)) from error
        return answer

    def kill(self) -> None:
        self._cluster.close()


def _prepare(order: Order, log: str, name: str, rank: int) -> None:  # noqa: ARG001
    prepare_process(order, Path(log), f"{order.worker}.{name}")
