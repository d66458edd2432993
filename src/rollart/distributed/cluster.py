"""Worker and Cluster: one class, run by several ranks on the nodes of a Ray cluster, called as if it were one object.

    Cluster ──(every registered method)──► rank 0 … rank n−1: a Worker each, in a process of its own
            ◄── results in rank order, or the first error, with the rank and its node

    mode                  called on        arguments                           result
    execute_all           every rank       the same for all                    list, in rank order
    execute_rank_zero     the first rank   as given                            its result
    shard                 every rank       lists and `Partition`s are split    lists concatenated, others in rank order

    >>> class Adder(Worker):                                    # doctest: +SKIP
    ...     def __init__(self, start): self.total = start
    ...     @register(mode="shard")
    ...     def add(self, numbers): self.total += sum(numbers); return self.rank, self.total
    ...     @register(mode="execute_rank_zero")
    ...     def first(self): return self.total
    >>> with Cluster(Adder, 2, 100) as adders:                  # doctest: +SKIP
    ...     adders.add([1, 2, 3, 4]), adders.first()
    ([(0, 103), (1, 107)], 103)

`cluster.add.start(…)` returns a `Pending` at once. Invariants:
- Calls of one rank run in the order in which they were made, one at a time; methods registered with `beside` run beside
  these, for what must not wait.
- A rank that is gone is noticed at once: calls that wait for it raise `RankLost`, `on_lost` is called, and what the
  process of a rank raises is `RankError`; both name the rank, its node and the cause.
- Ranks end with `close`, with the process that made the cluster, and with its run.
- One bundle of a placement group per rank, if `needs` or `resources` is given; without, nothing is reserved.

Which hardware calls prefer is declared on the method (`worker.hw_mapping`), as is what is behind a URL
(`worker.register_serverless`); which devices ranks have is up to a `resources.ResourceManager`.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError, RayTaskError

from rollart.distributed.rank_placement import NodeOfRank, RankRoom, Strategy, release_rooms, reserve_ranks
from rollart.distributed.ray_process import TOKEN_VARIABLE
from rollart.distributed.resources import Binding, ResourceManager
from rollart.distributed.worker import Mode, Registered, Route, Worker, route
from rollart.ports.factory import load
from rollart.types.errors import RankError, RankLost, RequestError
from rollart.types.placement import Needs

logger = logging.getLogger(__name__)

WATCH, BESIDE = "watch", "beside"
REMOTE_FUNCTION = "rollart.backends.rewards.remote_function:RemoteFunction"
BESIDE_THREADS = 4
CLOSE_S = 5.0
LOG_TAIL_BYTES = 2000
UNEXPLAINED = "Worker unexpectedly exits with a connection error"
"""Ray's generic message for a process that is suddenly gone; it then lists possible causes."""
ENDED = "its process ended without an error: killed by hand or for lack of memory, or a crash in native code"


class Partition(list[Any]):
    """One element for each rank, as an argument of a `shard` method: the rank gets the element itself."""


class Pending:
    """The results of a call to come."""

    def __init__(self, futures: "Mapping[int, Future[Any]]", gather: Callable[[list[Any]], Any]) -> None:
        self._futures = futures
        self._gather = gather
        self._first_failure: Future[None] = Future()
        self._left = len(futures)
        self._lock = threading.Lock()
        for future in futures.values():
            future.add_done_callback(self._one_done)

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._first_failure.done()

    def result(self, timeout_s: float | None = None) -> Any:
        """The result; raises at the first rank that fails, without waiting for the others, and `TimeoutError`."""
        try:
            self._first_failure.result(timeout_s)
        except FutureTimeout:
            late = [rank for rank, future in self._futures.items() if not future.done()]
            raise TimeoutError(f"ranks {late} have not answered within {timeout_s:g} s") from None
        return self._gather([future.result() for future in self._futures.values()])

    def _one_done(self, future: "Future[Any]") -> None:
        error = future.exception()
        with self._lock:
            self._left -= 1
            if self._first_failure.done():
                return
            if error is not None:
                self._first_failure.set_exception(error)
            elif not self._left:
                self._first_failure.set_result(None)


class Method:
    """A registered method of all ranks."""

    def __init__(self, cluster: "Cluster", name: str, registered: Registered) -> None:
        self._cluster = cluster
        self._name = name
        self._registered = registered

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.start(*args, **named).result()

    def start(self, *args: Any, **named: Any) -> Pending:
        """Call without waiting."""
        cluster, ranks = self._cluster, self._ranks(args, named)
        match self._registered.mode:
            case Mode.EXECUTE_RANK_ZERO:
                return Pending(
                    {ranks[0]: cluster.start_on(ranks[0], self._name, *args, **named)}, lambda found: found[0]
                )
            case Mode.EXECUTE_ALL:
                return Pending({rank: cluster.start_on(rank, self._name, *args, **named) for rank in ranks}, list)
        positional = [_split(value, len(ranks)) for value in args]
        by_name = {key: _split(value, len(ranks)) for key, value in named.items()}
        return Pending(
            {
                rank: cluster.start_on(
                    rank,
                    self._name,
                    *(parts[index] for parts in positional),
                    **{key: parts[index] for key, parts in by_name.items()},
                )
                for index, rank in enumerate(ranks)
            },
            _joined,
        )

    def _ranks(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Sequence[int]:
        affinity = self._registered.affinity
        if affinity is None:
            return self._cluster.rank_numbers
        return self._cluster.routed(self._name, affinity.classes, affinity.tag_of(args, named)).ranks


def _split(value: Any, ranks: int) -> Sequence[Any]:
    """An argument for each rank.

    >>> _split([1, 2, 3, 4, 5], 2), _split(Partition(["a", "b"]), 2), _split("whole", 2)
    ([[1, 2], [3, 4, 5]], ['a', 'b'], ['whole', 'whole'])
    """
    if isinstance(value, Partition):
        if len(value) != ranks:
            raise RequestError(f"a partition of {len(value)} elements cannot be split over {ranks} ranks")
        return list(value)
    if not isinstance(value, list):
        return [value] * ranks
    ends = [len(value) * number // ranks for number in range(ranks + 1)]
    return [value[start:end] for start, end in pairwise(ends)]


def _joined(results: list[Any]) -> list[Any]:
    if all(isinstance(result, list) for result in results):
        return [value for result in results for value in result]
    return results


class Cluster:
    """The ranks of one worker class. Every registered method of it is a method of the cluster."""

    def __init__(
        self,
        worker_class: type[Worker],
        ranks: int | Mapping[str, int],
        *args: Any,
        name: str = "",
        resources: ResourceManager | None = None,
        role: str = "",
        needs: Needs | None = None,
        strategy: Strategy = "PACK",
        place_s: float = 600.0,
        start_s: float | None = None,
        first: int = 0,
        prepare: Callable[[int], None] | None = None,
        log: str = "",
        on_lost: Callable[[int, RankLost], None] | None = None,
        **named: Any,
    ) -> None:
        """Start `ranks` workers with these arguments; returns when all are built, raises if one is not.

        With `resources`, ranks are bound to its devices: those of `role`, or as many of every hardware class as `ranks`
        says. Else every rank reserves `needs`. Both are packed on few nodes or spread over many; if there is no room
        within `place_s` seconds, `RequestError`; if processes or workers take longer than `start_s` to start,
        `TimeoutError`. Ranks count from `first`, if the caller is a rank itself. With a `name` the actors are called
        `<name> rank <rank>`. `prepare` is called with the rank in its process, first of all; `log` is the path of its
        output, with `{rank}`, for messages. `on_lost` is called from another thread.
        """
        self.name = name or worker_class.__name__
        number = ranks if isinstance(ranks, int) else sum(ranks.values())
        self.rank_numbers = range(first, first + number)
        self.bindings: dict[int, Binding] = {}
        """Devices of the ranks, with `resources`."""
        self.routes: dict[tuple[str, str], Route] = {}
        """By method and tag: where the last call went, and why."""
        self._resources = resources
        self._methods = worker_class.registered
        self._on_lost = on_lost
        self._closed = False
        self._lock = threading.Lock()
        self._lost: dict[int, RankLost] = {}
        self._log = log
        self._rooms = self._bound(ranks, role, needs, strategy, place_s)
        self._hosts: dict[int, Any] = {}
        self.nodes: dict[int, NodeOfRank] = {}
        """Nodes of the ranks."""
        self._watches: dict[int, Future[None]] = {}
        before = cloudpickle.dumps(prepare or partial(_extend_path, tuple(sys.path)))
        blob = cloudpickle.dumps((worker_class, args, named))
        try:
            for index, rank in enumerate(self.rank_numbers):
                room = self._rooms[index]
                options = room.options | ({"name": f"{name} rank {rank}"} if name else {})
                self._hosts[rank] = _HOST.options(**options).remote(rank, first + number, room.resource, before)
                self._watch(rank)
            found = Pending({rank: self._start(rank, "facts") for rank in self._hosts}, list).result(start_s)
            self.nodes = dict(zip(self.rank_numbers, found, strict=True))
            Pending({rank: self._start(rank, "build", blob) for rank in self._hosts}, list).result(start_s)
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Method:
        registered = self.__dict__.get("_methods", {}).get(name)
        if registered is None:
            raise AttributeError(f"{name!r} is not a registered method of the workers: decorate it with @register")
        return Method(self, name, registered)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start_on(self, rank: int, name: str, /, *args: Any, **named: Any) -> "Future[Any]":
        """Call a registered method of one rank, without waiting."""
        group = {"concurrency_group": BESIDE} if self._methods[name].beside else {}
        return self._start(rank, "call", name, args, named, **group)

    def close(self) -> None:
        """End all ranks, whatever they are doing; returns when they are gone."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for host in self._hosts.values():
            ray.kill(host)
        for watch in self._watches.values():
            with suppress(FutureTimeout, RankError):
                watch.result(CLOSE_S)
        release_rooms(self._rooms)
        if self._resources is not None:
            self._resources.release(list(self.bindings.values()))

    def routed(self, method: str, classes: Mapping[str, str], tag: str) -> Route:
        """The ranks for a call of a method with this tag, by its `hw_mapping`; recorded in `routes`."""
        with self._lock:
            living = {
                rank: room.resource
                for rank, room in zip(self.rank_numbers, self._rooms, strict=True)
                if rank not in self._lost
            }
            found = route(classes, tag, living)
            before = self.routes.get((method, tag))
            self.routes[method, tag] = found
        if found.why and (before is None or before.why != found.why):
            logger.warning("%s.%s of %s is not on %s: %s", self.name, method, tag, found.wanted, found.why)
        return found if found.ranks else found._replace(ranks=tuple(self.rank_numbers))

    def _bound(
        self, ranks: int | Mapping[str, int], role: str, needs: Needs | None, strategy: Strategy, place_s: float
    ) -> list[RankRoom]:
        """Where the ranks go."""
        if self._resources is not None:
            if needs is not None:
                raise RequestError(f"{self.name}: give resources or needs; a resource manager has needs by class")
            bound = self._resources.bind(self.name, role, ranks, self.rank_numbers.start, strategy, place_s)
            self.bindings = {binding.rank: binding for binding, _ in bound}
            return [room for _, room in bound]
        if role or not isinstance(ranks, int):
            raise RequestError(f"{self.name}: roles and ranks by hardware class are those of a resource manager")
        if needs is None:
            return [RankRoom({"num_cpus": 0}, None, "")] * ranks
        return reserve_ranks(self.name, needs, ranks, strategy, place_s).rooms()

    def _start(self, rank: int, method: str, *args: Any, **options: Any) -> "Future[Any]":
        actor_method = getattr(self._hosts[rank], method)
        if options:
            actor_method = actor_method.options(**options)
        done: Future[Any] = Future()

        def settle(found: "Future[Any]") -> None:
            error = found.exception()
            if error is None:
                done.set_result(found.result())
            else:
                done.set_exception(self._named(rank, error))

        actor_method.remote(*args).future().add_done_callback(settle)
        return done

    def _watch(self, rank: int) -> None:
        self._watches[rank] = self._start(rank, "wait")
        self._watches[rank].add_done_callback(lambda done: self._ended(rank, done.exception()))

    def _ended(self, rank: int, error: BaseException | None) -> None:
        with self._lock:
            if self._closed:
                return
            if isinstance(error, RankLost):
                self._lost[rank] = error
        if self._on_lost is not None and isinstance(error, RankLost):
            self._on_lost(rank, error)

    def _named(self, rank: int, error: BaseException) -> BaseException:
        """The error with the name of its rank and node."""
        node = self.nodes.get(rank)
        where = "a node not known yet" if node is None else str(node)
        if isinstance(error, RayTaskError):
            cause = error.cause
            named = RankError(rank, where, f"{type(cause).__name__}: {cause}")
            named.__cause__ = cause
            return named
        if isinstance(error, RayError):
            kind = RankLost if isinstance(error, RayActorError) else RankError
            return kind(rank, where, self._with_output(rank, _why(error)))
        return error

    def _with_output(self, rank: int, why: str) -> str:
        """The last output of the rank, if its log can be read here."""
        output = b""
        if self._log:
            with suppress(OSError):
                output = Path(self._log.format(rank=rank)).read_bytes()[-LOG_TAIL_BYTES:]
        text = output.decode(errors="replace").strip()
        return f"{why}; last output: {text}" if text else why


def _why(error: RayError) -> str:
    reason = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    return ENDED if UNEXPLAINED in str(error) else reason


def _extend_path(paths: tuple[str, ...], rank: int) -> None:  # noqa: ARG001
    """Extend a rank's import path by the caller's; for ranks on this machine."""
    sys.path.extend(path for path in paths if path not in sys.path)


class _RankHost:
    """The process of one rank."""

    def __init__(self, rank: int, ranks: int, resource: str, prepare: bytes) -> None:
        os.environ.pop(TOKEN_VARIABLE, None)  # processes started by the worker must not inherit it
        cloudpickle.loads(prepare)(rank)
        self._rank, self._ranks, self._resource = rank, ranks, resource
        self._worker: Any = None
        self._over = threading.Event()

    def facts(self) -> NodeOfRank:
        context = ray.get_runtime_context()
        return NodeOfRank(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid())

    def build(self, blob: bytes) -> None:
        worker_class, args, named = cloudpickle.loads(blob)
        worker = worker_class.__new__(worker_class)
        worker.rank, worker.ranks = self._rank, self._ranks
        worker.node, worker.address, _ = self.facts()
        worker.resource = self._resource
        worker.__init__(*args, **named)
        for attribute, found in worker_class.serverless.items():
            setattr(worker, attribute, load(REMOTE_FUNCTION)(found.url, **found.options))
        self._worker = worker

    def call(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return getattr(self._worker, name)(*args, **named)

    @ray.method(concurrency_group=WATCH)  # type: ignore[untyped-decorator]
    def wait(self) -> None:
        """Never returns; fails when the process is gone."""
        self._over.wait()


_HOST = ray.remote(
    max_restarts=0,
    max_task_retries=0,
    allow_out_of_order_execution=False,
    concurrency_groups={WATCH: 1, BESIDE: BESIDE_THREADS},
)(_RankHost)
