"""Hardware-affinity routing: which engine takes a trajectory's next turn.

A task prefers a hardware class (many turns: a compute-optimised one; long answers: a bandwidth-optimised one) and lists
the classes that it can fall back to. Within a class the least loaded engine wins, where load = requests in flight /
slots; ties go to the engine that joined first.

Invariants:

- A trajectory stays with its KV cache: it moves only if its engine is out of service or older than its last token, and
  back from a fallback to its preferred class.
- It is never placed on an engine that serves no weights, that left, or that is older than its last token.
- A new placement is in the preferred class whenever that class has an engine below the high watermark. It falls back
  only to a less loaded engine, and returns only when the preferred class has an engine below the low watermark:
  between the two watermarks nothing moves, so placements do not flap.
- Requests in flight at an engine = started − ended, also while it is out of service and after it came back.
- The preferred class of a task may change (`prefer`). A trajectory elsewhere then moves there once (`follow`), at a
  turn at which the class has an engine below the low watermark. A new trajectory that measures a class (`probe`) is
  placed there while it has an engine below the high watermark, and stays.

A worked example: FrozenLake prefers H800 (one engine of 8 slots) and may fall back to H20 (one engine of 8 slots).

    in flight at H800    what happens
    15 (1.875)           a new trajectory goes to H800, reason ''
    16 (2.0, high)       a new one goes to H20, reason 'H800 overloaded'
    8  (1.0, low)        its next turn stays on H20, with its KV
    7  (0.875)           its next turn goes to H800, reason 'H800 available again'; from then on it stays there

    >>> from rollart.types.ids import TrajectoryId, WorkerId
    >>> router = Router({"FrozenLake": TaskAffinity("H800", ("H20",))})
    >>> router.engine_joined(WorkerId("h20"), "H20", slots=8)
    >>> router.engine_serves(WorkerId("h20"), Version(0, 0))
    >>> placed = router.place(TrajectoryId(1), "FrozenLake", at_least=None, now=0.0)
    >>> placed.decode, placed.reason
    ('h20', 'H800 missing')
"""

import heapq
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from rollart.types.errors import InvariantBroken, RequestError
from rollart.types.ids import TrajectoryId, WorkerId
from rollart.types.versions import Version


class TaskAffinity(msgspec.Struct, frozen=True):
    """Hardware classes for a task's turns.

    `preferred` None means no affinity: the least loaded engine of the classes in `fallback`, or of all if it is empty.
    """

    preferred: str | None = None
    fallback: tuple[str, ...] = ()


class Placement(msgspec.Struct, frozen=True):
    """Engine for a turn. `prefill` and `decode` are the same engine until there is a prefill/decode split.

    `reason` explains a placement outside the preferred class: `H800 missing`, `H800 too old` (its engines serve weights
    older than the trajectory's last token) or `H800 overloaded`; and, once, the way back: `H800 available again`, or
    after a change of the preferred class `H800 preferred now`. A trajectory that measures a class has `H800 is
    measured`, wherever its task prefers to run.
    """

    prefill: WorkerId
    decode: WorkerId
    hardware: str
    reason: str = ""


NO_AFFINITY = TaskAffinity()


def measures(hardware: str) -> str:
    """Reason of a placement that measures a class."""
    return f"{hardware} is measured"


class _Home(NamedTuple):
    """Location of a trajectory's KV cache, and the preferred class if it is elsewhere."""

    placement: Placement
    away_from: "_Pool | None"
    way_back: str = "available again"
    """Reason recorded when it moves back."""


class _Engine:
    """Router state of one engine. `version` is None while it is not in service."""

    __slots__ = ("home", "in_flight", "load", "order", "pool", "queued", "slots", "version", "worker")

    def __init__(self, worker: WorkerId, pool: "_Pool", slots: int) -> None:
        self.worker = worker
        self.pool = pool
        self.home = _Home(Placement(worker, worker, pool.name), None)
        """Shared placement of trajectories on their preferred class."""
        self.slots = slots
        self.order = 0
        self.version: Version | None = None
        self.in_flight = 0
        self.load = 0.0
        self.queued: float | None = None
        """Its key in the pool's queue, at most its load; None while it is not in service."""

    def takes(self, at_least: Version | None) -> bool:
        return self.version is not None and (at_least is None or self.version >= at_least)


class _Pool:
    """Engines of one hardware class, in the order in which they joined.

    `spare` counts those in service and below the low watermark, so that a trajectory in a fallback class can check in
    O(1), at every turn, whether it can return. `_queue` is a heap of those in service by load, then by order of
    joining; an entry whose engine's load has grown is moved when it reaches the top. So a placement inspects a few
    engines rather than a thousand.
    """

    __slots__ = ("_queue", "engines", "name", "spare")

    def __init__(self, name: str) -> None:
        self.name = name
        self.engines: dict[WorkerId, _Engine] = {}
        self.spare = 0
        self._queue: list[tuple[float, int, _Engine]] = []

    def offer(self, engine: _Engine) -> None:
        """Queue an engine in service that is new or whose load has dropped."""
        if engine.queued is None or engine.load < engine.queued:
            engine.queued = engine.load
            heapq.heappush(self._queue, (engine.load, engine.order, engine))

    def least_loaded(self, at_least: Version | None) -> _Engine | None:
        """The least loaded engine that can take a turn after `at_least`; ties go to the one that joined first."""
        queue = self._queue
        while queue:
            load, order, engine = queue[0]
            if load != engine.queued or order != engine.order:
                heapq.heappop(queue)  # stale: it left, or was queued again with less load
            elif load != engine.load:
                engine.queued = engine.load
                heapq.heapreplace(queue, (engine.load, order, engine))
            elif engine.takes(at_least):
                return engine
            else:
                return self._look_through(at_least)
        return None

    def _look_through(self, at_least: Version | None) -> _Engine | None:
        """Linear scan, for when several versions are in service and the least loaded engine may be too old."""
        best: _Engine | None = None
        for engine in self.engines.values():
            if (best is None or engine.load < best.load) and engine.takes(at_least):
                best = engine
        return best


class Router:
    """Places turns; owns only the engines' load and the trajectories' homes.

    Loads are in multiples of an engine's slots. Call `request_started` together with `place`, before the next `place`:
    a placed request that is not counted looks like free capacity.
    """

    def __init__(
        self, affinity: Mapping[str, TaskAffinity], *, high_watermark: float = 2.0, low_watermark: float = 1.0
    ) -> None:
        if not 0.0 < low_watermark <= high_watermark:
            raise RequestError(
                f"routing needs 0 < low watermark <= high watermark, got {low_watermark:g} and {high_watermark:g}"
            )
        self._high = high_watermark
        self._low = low_watermark
        self._affinity = dict(affinity)
        self._pools: dict[str, _Pool] = {}
        self._engines: dict[WorkerId, _Engine] = {}
        self._homes: dict[TrajectoryId, _Home] = {}
        self._joins = 0

    # --- engines ----------------------------------------------------------------------------------------------------

    def engine_joined(self, worker: WorkerId, hardware: str, slots: int) -> None:
        """Add an engine; it gets work once it serves a version. Idempotent."""
        if slots < 1:
            raise RequestError(f"{worker} declares {slots} slots; an engine needs at least 1")
        engine = self._engines.get(worker)
        if engine is not None and worker in engine.pool.engines:
            return
        pool = self._pool(hardware)
        if engine is None:
            engine = self._engines[worker] = _Engine(worker, pool, slots)
        else:  # it rejoins, maybe with requests in flight from before
            engine.pool, engine.slots = pool, slots
            engine.home = _Home(Placement(worker, worker, hardware), None)
            engine.load = engine.in_flight / slots
        engine.order = self._joins
        self._joins += 1
        pool.engines[worker] = engine

    def engine_serves(self, worker: WorkerId, version: Version) -> None:
        """Record that the engine serves `version` from now on.

        Versions only grow, so an older one is a late duplicate and ignored, as is any message of an engine that left.
        """
        engine = self._engines.get(worker)
        if engine is None or worker not in engine.pool.engines:
            return
        if engine.version is None:
            engine.version = version
            engine.pool.spare += engine.load < self._low
            engine.pool.offer(engine)
        elif version > engine.version:
            engine.version = version

    def engine_left(self, worker: WorkerId) -> None:
        """Take the engine out of service. `engine_joined`, then `engine_serves`, brings it back."""
        engine = self._engines.get(worker)
        if engine is None or engine.pool.engines.pop(worker, None) is None:
            return
        if engine.version is not None:
            engine.version = engine.queued = None
            engine.pool.spare -= engine.load < self._low
        self._forget_if_over(engine)

    def serves(self, task: str) -> bool:
        """Whether any engine in service is of a class that the task can use, whatever its version."""
        return any(pool.least_loaded(None) is not None for pool in self._classes(task))

    def spare(self, hardware: str) -> int:
        """Number of engines of the class in service and below the low watermark."""
        pool = self._pools.get(hardware)
        return 0 if pool is None else pool.spare

    # --- load -------------------------------------------------------------------------------------------------------

    def request_started(self, worker: WorkerId) -> None:
        """Count a request sent to the engine."""
        engine = self._engines.get(worker)
        if engine is None:
            raise InvariantBroken(f"a request was sent to {worker}, which left or never joined; place the turn again")
        self._count(engine, 1)

    def request_ended(self, worker: WorkerId) -> None:
        """Count the end of a request, however it ended. Every request ends once, even if its engine died."""
        engine = self._engines.get(worker)
        if engine is None or not engine.in_flight:
            raise InvariantBroken(f"a request of {worker} ended that never started, or ended twice")
        self._count(engine, -1)
        self._forget_if_over(engine)

    def in_flight(self, worker: WorkerId) -> int:
        """Requests started at the engine and not ended."""
        engine = self._engines.get(worker)
        return 0 if engine is None else engine.in_flight

    def _count(self, engine: _Engine, change: int) -> None:
        before = engine.load
        engine.in_flight += change
        after = engine.load = engine.in_flight / engine.slots
        if engine.version is not None:
            engine.pool.spare += (after < self._low) - (before < self._low)
            if change < 0:
                engine.pool.offer(engine)

    def _forget_if_over(self, engine: _Engine) -> None:
        """Drop an engine that left, after its last request: a worker id is one incarnation and never returns."""
        if not engine.in_flight and engine.worker not in engine.pool.engines:
            del self._engines[engine.worker]

    # --- preferences ------------------------------------------------------------------------------------------------

    def prefer(self, task: str, hardware: str | None) -> None:
        """Change the preferred class of a task; None for no preference. The classes that it can use stay the same."""
        self._affinity[task] = msgspec.structs.replace(self._affinity[task], preferred=hardware)

    def follow(self, trajectory: TrajectoryId, task: str) -> None:
        """Let a trajectory move to the class that its task prefers now, if it is elsewhere."""
        home, preferred = self._homes.get(trajectory), self._affinity[task].preferred
        if home is not None and preferred not in (None, home.placement.hardware):
            self._homes[trajectory] = _Home(home.placement, self._pool(str(preferred)), "preferred now")

    # --- trajectories -----------------------------------------------------------------------------------------------

    def place(
        self,
        trajectory: TrajectoryId,
        task: str,
        at_least: Version | None,
        now: float,  # noqa: ARG002  part of the policy interface; these rules do not depend on it
        probe: str | None = None,
    ) -> Placement | None:
        """Choose the engine for the trajectory's next turn; None if no engine can take it now.

        `at_least` is the version of the trajectory's last token, None before the first. `probe` is the class that a
        new trajectory measures.
        """
        home = self._homes.get(trajectory)
        if home is not None:
            placement, preferred, way_back = home
            engine = self._engines.get(placement.decode)
            if engine is not None and engine.takes(at_least):
                if preferred is None or not preferred.spare:
                    return placement
                if preferred.name != self._affinity[task].preferred:
                    self._homes[trajectory] = engine.home  # what it is away from is no longer preferred
                    return placement
                back = preferred.least_loaded(at_least)
                if back is None or back.load >= self._low:
                    return placement
                return self._settle(trajectory, back, f"{preferred.name} {way_back}", None)
        if probe is not None:
            best = self._pool(probe).least_loaded(at_least)
            if best is not None and best.load < self._high:
                return self._settle(trajectory, best, measures(probe), None)
        return self._place_anew(trajectory, task, at_least)

    def trajectory_ended(self, trajectory: TrajectoryId) -> None:
        """Forget the home of the trajectory's KV cache."""
        self._homes.pop(trajectory, None)

    def _place_anew(self, trajectory: TrajectoryId, task: str, at_least: Version | None) -> Placement | None:
        affinity = self._affinity.get(task, NO_AFFINITY)
        engines: list[_Engine] = []
        for pool in self._classes(task):
            best = pool.least_loaded(at_least)
            if best is not None:
                engines.append(best)
                if affinity.preferred is not None and best.load < self._high:
                    break  # the first class with room; the rest need not be checked
        if not engines:
            return None
        if affinity.preferred is None:
            return self._settle(trajectory, min(engines, key=lambda engine: (engine.load, engine.order)), "", None)
        # If no class has room: the least loaded engine, ties to the earlier class.
        engine = engines[-1] if engines[-1].load < self._high else min(engines, key=lambda engine: engine.load)
        preferred = self._pool(affinity.preferred)
        if engine.pool is preferred:
            return self._settle(trajectory, engine, "", None)
        return self._settle(trajectory, engine, f"{preferred.name} {self._why_not(preferred, at_least)}", preferred)

    @staticmethod
    def _why_not(pool: _Pool, at_least: Version | None) -> str:
        if pool.least_loaded(at_least) is not None:
            return "overloaded"
        return "missing" if pool.least_loaded(None) is None else "too old"

    def _settle(self, trajectory: TrajectoryId, engine: _Engine, reason: str, away_from: _Pool | None) -> Placement:
        placement = Placement(engine.worker, engine.worker, engine.pool.name, reason)
        # In the preferred class, later turns need no reason.
        self._homes[trajectory] = engine.home if away_from is None else _Home(placement, away_from)
        return placement

    def _classes(self, task: str) -> Iterable[_Pool]:
        """Classes that a task can use, the preferred one first."""
        affinity = self._affinity.get(task, NO_AFFINITY)
        if affinity.preferred is None and not affinity.fallback:
            return self._pools.values()
        names = affinity.fallback if affinity.preferred is None else (affinity.preferred, *affinity.fallback)
        return [self._pool(name) for name in dict.fromkeys(names)]

    def _pool(self, hardware: str) -> _Pool:
        return self._pools.setdefault(hardware, _Pool(hardware))
