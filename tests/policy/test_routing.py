"""Routing as a specification: first by example, then as properties of arbitrary histories."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.policy.routing import Placement, Router, TaskAffinity
from rollart.types.errors import InvariantBroken, RequestError
from rollart.types.ids import TrajectoryId, WorkerId
from rollart.types.versions import Version

V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)
GAME = TaskAffinity("H800", ("H20",))


def cluster(affinity: TaskAffinity = GAME, **engines: tuple[str, int, int]) -> Router:
    """A router with one task, "game", and engines given as name=(hardware, slots, requests in flight)."""
    router = Router({"game": affinity})
    for name, (hardware, slots, in_flight) in engines.items():
        router.engine_joined(WorkerId(name), hardware, slots)
        router.engine_serves(WorkerId(name), V0)
        load(router, name, in_flight)
    return router


def load(router: Router, worker: str, in_flight: int) -> None:
    """Bring an engine to that many requests in flight."""
    while router.in_flight(WorkerId(worker)) < in_flight:
        router.request_started(WorkerId(worker))
    while router.in_flight(WorkerId(worker)) > in_flight:
        router.request_ended(WorkerId(worker))


def place(router: Router, trajectory: int = 1, at_least: Version | None = None, task: str = "game") -> Placement | None:
    return router.place(TrajectoryId(trajectory), task, at_least, 0.0)


def on(engine: str, hardware: str, reason: str = "") -> Placement:
    return Placement(WorkerId(engine), WorkerId(engine), hardware, reason)


# --- inside a class -------------------------------------------------------------------------------------------------


def test_prefill_and_decode_are_the_same_engine_today() -> None:
    placed = place(cluster(a=("H800", 8, 0)))
    assert placed is not None
    assert placed.prefill == placed.decode == "a"
    assert placed == Placement(WorkerId("a"), WorkerId("a"), "H800")


def test_affinities_and_placements_are_values() -> None:
    assert len({GAME, TaskAffinity("H800", ("H20",)), on("a", "H800"), on("a", "H800")}) == 2
    with pytest.raises(AttributeError):
        GAME.preferred = "H20"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        on("a", "H800").hardware = "H20"  # type: ignore[misc]


def test_the_least_loaded_engine_by_slots_takes_a_new_trajectory() -> None:
    # 6 of 16 slots is less than 2 of 4, though it is more requests.
    assert place(cluster(a=("H800", 4, 2), b=("H800", 16, 6))) == on("b", "H800")


def test_ties_go_to_the_engine_that_joined_first() -> None:
    assert place(cluster(b=("H800", 4, 2), a=("H800", 8, 4))) == on("b", "H800")


def test_an_engine_that_came_back_joined_last() -> None:
    router = cluster(a=("H800", 4, 0), b=("H800", 4, 0))
    router.engine_left(WorkerId("a"))
    router.engine_joined(WorkerId("a"), "H800", 4)
    router.engine_serves(WorkerId("a"), V0)
    assert place(router) == on("b", "H800")


def test_an_engine_that_came_back_in_another_class_is_of_that_class() -> None:
    router = cluster(a=("H800", 4, 1))
    router.engine_left(WorkerId("a"))
    router.engine_joined(WorkerId("a"), "H20", 4)
    router.engine_serves(WorkerId("a"), V0)
    chat = TrajectoryId(1)
    placed = [router.place(chat, "anywhere", None, 0.0) for _ in range(2)]
    assert [placement and placement.hardware for placement in placed] == ["H20", "H20"]


def test_an_engine_that_serves_no_version_yet_gets_nothing() -> None:
    router = Router({"game": GAME})
    router.engine_joined(WorkerId("a"), "H800", 8)
    assert place(router) is None
    assert not router.serves("game")
    router.engine_serves(WorkerId("a"), V0)
    assert place(router) == on("a", "H800")
    assert router.serves("game")


# --- stickiness -----------------------------------------------------------------------------------------------------


def test_a_trajectory_stays_with_its_engine_however_loaded_it_gets() -> None:
    router = cluster(a=("H800", 8, 0), b=("H800", 8, 0), c=("H20", 8, 0))
    assert place(router) == on("a", "H800")
    load(router, "a", 100)
    assert place(router, at_least=V0) == on("a", "H800")


def test_an_ended_trajectory_is_forgotten() -> None:
    router = cluster(a=("H800", 8, 0), b=("H800", 8, 0))
    place(router)
    load(router, "a", 1)
    router.trajectory_ended(TrajectoryId(1))
    assert place(router) == on("b", "H800")
    router.trajectory_ended(TrajectoryId(99))  # one that was never placed


def test_when_its_engine_leaves_a_trajectory_moves_inside_its_class() -> None:
    router = cluster(a=("H800", 8, 0), b=("H800", 8, 5))
    place(router)
    router.engine_left(WorkerId("a"))
    assert place(router, at_least=V0) == on("b", "H800")
    assert place(router, at_least=V0) == on("b", "H800")


def test_a_trajectory_does_not_wait_for_an_engine_that_left_under_its_request() -> None:
    router = cluster(a=("H800", 8, 0), b=("H800", 8, 5))
    place(router)
    router.request_started(WorkerId("a"))
    router.engine_left(WorkerId("a"))
    assert router.in_flight(WorkerId("a")) == 1, "its owner still has to end it"
    assert place(router, at_least=V0) == on("b", "H800")


def test_an_engine_out_of_service_for_a_while_keeps_its_trajectories_if_nobody_asked() -> None:
    router = cluster(a=("H800", 8, 3), b=("H800", 8, 4))
    assert place(router) == on("a", "H800")
    load(router, "a", 8)
    router.engine_left(WorkerId("a"))
    router.engine_joined(WorkerId("a"), "H800", 8)
    assert place(router, 2) == on("b", "H800")
    router.engine_serves(WorkerId("a"), V1)
    assert place(router, 1, V0) == on("a", "H800")


def test_a_trajectory_that_found_no_engine_goes_to_the_next_one() -> None:
    router = cluster(a=("H800", 8, 0))
    place(router)
    router.engine_left(WorkerId("a"))
    assert place(router, at_least=V0) is None
    router.engine_joined(WorkerId("b"), "H800", 8)
    router.engine_serves(WorkerId("b"), V0)
    assert place(router, at_least=V0) == on("b", "H800")


# --- versions -------------------------------------------------------------------------------------------------------


def test_a_trajectory_never_moves_to_an_engine_older_than_its_last_token() -> None:
    router = cluster(a=("H800", 8, 0), b=("H800", 8, 0), c=("H800", 8, 7))
    place(router)
    router.engine_serves(WorkerId("a"), V1)
    router.engine_serves(WorkerId("c"), V1)
    router.engine_left(WorkerId("a"))
    assert place(router, at_least=V1) == on("c", "H800")


def test_an_equal_version_will_do_and_a_newer_one_too() -> None:
    router = cluster(a=("H800", 8, 0))
    router.engine_serves(WorkerId("a"), V1)
    assert place(router, 1, V1) == on("a", "H800")
    assert place(router, 2, V0) == on("a", "H800")
    assert place(router, 3, V2) is None


def test_a_trajectory_leaves_its_engine_if_that_came_back_older() -> None:
    router = cluster(a=("H800", 8, 0), b=("H800", 8, 0))
    place(router)
    router.engine_serves(WorkerId("b"), V1)
    router.engine_left(WorkerId("a"))
    router.engine_joined(WorkerId("a"), "H800", 8)
    router.engine_serves(WorkerId("a"), V0)
    assert place(router, at_least=V1) == on("b", "H800")


def test_an_older_version_is_a_late_duplicate_and_void() -> None:
    router = cluster(a=("H800", 8, 0))
    router.engine_serves(WorkerId("a"), V2)
    router.engine_serves(WorkerId("a"), V1)
    assert place(router, at_least=V2) == on("a", "H800")
    assert router.spare("H800") == 1


def test_a_preferred_class_that_is_behind_is_left_for_one_that_is_not() -> None:
    router = cluster(a=("H800", 8, 0), b=("H20", 8, 0))
    router.engine_serves(WorkerId("b"), V1)
    assert place(router, at_least=V1) == on("b", "H20", "H800 too old")
    assert place(router, at_least=V1) == on("b", "H20", "H800 too old")
    router.engine_serves(WorkerId("a"), V1)
    assert place(router, at_least=V1) == on("a", "H800", "H800 available again")


# --- falling back ---------------------------------------------------------------------------------------------------


def test_falls_back_when_the_preferred_class_is_missing() -> None:
    router = cluster(b=("H20", 8, 0))
    assert place(router) == on("b", "H20", "H800 missing")
    assert place(router) == on("b", "H20", "H800 missing")


def test_falls_back_when_the_preferred_class_died_under_it() -> None:
    router = cluster(a=("H800", 8, 0), b=("H20", 8, 0))
    place(router)
    router.engine_left(WorkerId("a"))
    assert place(router, at_least=V0) == on("b", "H20", "H800 missing")


def test_an_engine_without_weights_does_not_keep_its_class_from_missing() -> None:
    router = cluster(b=("H20", 8, 0))
    router.engine_joined(WorkerId("a"), "H800", 8)
    assert place(router) == on("b", "H20", "H800 missing")


def test_prefers_its_class_just_below_the_high_watermark_and_falls_back_at_it() -> None:
    assert place(cluster(a=("H800", 8, 15), b=("H20", 8, 0))) == on("a", "H800")
    assert place(cluster(a=("H800", 8, 16), b=("H20", 8, 0))) == on("b", "H20", "H800 overloaded")
    assert place(cluster(a=("H800", 8, 17), b=("H20", 8, 0))) == on("b", "H20", "H800 overloaded")


def test_one_engine_below_the_watermark_keeps_the_class_from_being_overloaded() -> None:
    assert place(cluster(a=("H800", 8, 30), b=("H800", 8, 15), c=("H20", 8, 0))) == on("b", "H800")


def test_when_all_are_overloaded_the_least_loaded_class_wins_and_ties_stay_home() -> None:
    assert place(cluster(a=("H800", 8, 20), b=("H20", 8, 19))) == on("b", "H20", "H800 overloaded")
    assert place(cluster(b=("H20", 8, 20), a=("H800", 8, 20))) == on("a", "H800")
    assert place(cluster(a=("H800", 8, 20), b=("H20", 8, 21))) == on("a", "H800")


def test_classes_are_tried_in_the_order_of_fallback() -> None:
    three = TaskAffinity("H800", ("H20", "A10"))
    assert place(cluster(three, z=("A10", 8, 0), b=("H20", 8, 9))) == on("b", "H20", "H800 missing")
    assert place(cluster(three, z=("A10", 8, 9), b=("H20", 8, 16))) == on("z", "A10", "H800 missing")
    assert place(cluster(three, z=("A10", 8, 0), a=("H800", 8, 16))) == on("z", "A10", "H800 overloaded")


def test_a_class_that_the_task_did_not_name_is_never_used() -> None:
    router = cluster(TaskAffinity("H800"), b=("H20", 8, 0))
    assert place(router) is None
    assert not router.serves("game")
    assert place(cluster(TaskAffinity("H800"), a=("H800", 1, 99), b=("H20", 8, 0))) == on("a", "H800")


def test_a_preferred_class_named_again_among_the_fallbacks_counts_once() -> None:
    router = cluster(TaskAffinity("H800", ("H800", "H20")), a=("H800", 8, 16), b=("H20", 8, 0))
    assert place(router) == on("b", "H20", "H800 overloaded")


# --- going back -----------------------------------------------------------------------------------------------------


def test_goes_back_just_below_the_low_watermark_and_not_at_it() -> None:
    router = cluster(a=("H800", 8, 16), b=("H20", 8, 0))
    assert place(router) == on("b", "H20", "H800 overloaded")
    load(router, "a", 15)
    assert place(router, at_least=V0) == on("b", "H20", "H800 overloaded")
    load(router, "a", 8)
    assert place(router, at_least=V0) == on("b", "H20", "H800 overloaded")
    load(router, "a", 7)
    assert place(router, at_least=V0) == on("a", "H800", "H800 available again")
    load(router, "a", 50)
    assert place(router, at_least=V0) == on("a", "H800"), "back home it is sticky like any other"


def test_goes_back_when_the_missing_class_comes_back() -> None:
    router = cluster(b=("H20", 8, 0))
    place(router)
    router.engine_joined(WorkerId("a"), "H800", 8)
    assert place(router, at_least=V0) == on("b", "H20", "H800 missing"), "it serves nothing yet"
    router.engine_serves(WorkerId("a"), V0)
    assert place(router, at_least=V0) == on("a", "H800", "H800 available again")


def test_does_not_go_back_to_an_engine_older_than_its_last_token() -> None:
    router = cluster(a=("H800", 8, 16), b=("H20", 8, 0), c=("H800", 8, 16))
    place(router)
    load(router, "a", 0)
    load(router, "c", 8)
    for newer in ("b", "c"):
        router.engine_serves(WorkerId(newer), V1)
    assert place(router, at_least=V1) == on("b", "H20", "H800 overloaded"), "a has room but is too old, c has none"
    load(router, "c", 7)
    assert place(router, at_least=V1) == on("c", "H800", "H800 available again")


def test_goes_back_to_the_least_loaded_engine_only() -> None:
    router = cluster(a=("H800", 8, 16), b=("H20", 8, 0), c=("H800", 8, 16))
    place(router)
    load(router, "c", 5)
    load(router, "a", 6)
    assert place(router, at_least=V0) == on("c", "H800", "H800 available again")


def test_watermarks_can_be_set() -> None:
    router = Router({"game": GAME}, high_watermark=0.5, low_watermark=0.25)
    for name, hardware in (("a", "H800"), ("b", "H20")):
        router.engine_joined(WorkerId(name), hardware, 8)
        router.engine_serves(WorkerId(name), V0)
    load(router, "a", 4)
    assert place(router) == on("b", "H20", "H800 overloaded")
    load(router, "a", 2)
    assert place(router, at_least=V0) == on("b", "H20", "H800 overloaded")
    load(router, "a", 1)
    assert place(router, at_least=V0) == on("a", "H800", "H800 available again")


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (1.5, 1.0), (float("nan"), 1.0)])
def test_watermarks_that_make_no_sense_are_refused(low: float, high: float) -> None:
    with pytest.raises(RequestError, match=r"^routing needs 0 < low watermark <= high watermark, got \S+ and 1$"):
        Router({}, low_watermark=low, high_watermark=high)


def test_equal_watermarks_are_allowed() -> None:
    Router({}, low_watermark=1.0, high_watermark=1.0)


# --- no affinity ----------------------------------------------------------------------------------------------------


def test_without_affinity_the_least_loaded_of_all_classes_wins_and_ties_go_by_joining() -> None:
    none = TaskAffinity()
    assert place(cluster(none, a=("H800", 8, 2), b=("H20", 8, 1))) == on("b", "H20")
    assert place(cluster(none, b=("H20", 8, 3), a=("H800", 8, 3))) == on("b", "H20")
    assert place(cluster(none, b=("H20", 8, 4), a=("H800", 8, 3), c=("H20", 8, 3))) == on("a", "H800")
    assert place(cluster(none, a=("H800", 8, 99))) == on("a", "H800")


def test_without_affinity_nothing_pulls_a_trajectory_anywhere() -> None:
    router = cluster(TaskAffinity(), a=("H800", 8, 16), b=("H20", 8, 0))
    place(router)
    load(router, "b", 30)
    load(router, "a", 0)
    assert place(router, at_least=V0) == on("b", "H20")


def test_without_affinity_classes_can_still_be_ruled_out() -> None:
    router = cluster(TaskAffinity(None, ("H20",)), a=("H800", 8, 0), b=("H20", 8, 7))
    assert place(router) == on("b", "H20")


def test_a_task_that_nobody_configured_has_no_affinity() -> None:
    router = cluster(a=("H800", 8, 2), b=("H20", 8, 1))
    assert place(router, task="other") == on("b", "H20")
    assert router.serves("other")
    assert not Router({}).serves("other")


# --- load -----------------------------------------------------------------------------------------------------------


def test_requests_of_an_engine_that_left_still_end_and_are_counted_when_it_comes_back() -> None:
    router = cluster(a=("H800", 8, 3))
    router.engine_left(WorkerId("a"))
    router.request_ended(WorkerId("a"))
    assert router.in_flight(WorkerId("a")) == 2
    router.engine_joined(WorkerId("a"), "H800", 4)
    assert router.spare("H800") == 0, "serves nothing yet"
    router.engine_serves(WorkerId("a"), V0)
    assert router.spare("H800") == 1, "2 requests in 4 slots"
    load(router, "a", 4)
    assert router.spare("H800") == 0, "4 requests in 4 slots"
    load(router, "a", 2)
    router.engine_left(WorkerId("a"))
    router.engine_joined(WorkerId("a"), "H800", 2)
    router.engine_serves(WorkerId("a"), V0)
    assert router.spare("H800") == 0, "2 requests in 2 slots"


def test_an_engine_may_come_back_as_another_class() -> None:
    router = cluster(a=("H800", 8, 3))
    router.engine_left(WorkerId("a"))
    router.engine_joined(WorkerId("a"), "H20", 8)
    router.engine_serves(WorkerId("a"), V0)
    assert (router.spare("H800"), router.spare("H20")) == (0, 1)
    assert place(router) == on("a", "H20", "H800 missing")


def test_a_request_cannot_end_that_did_not_start() -> None:
    router = cluster(a=("H800", 8, 1))
    router.request_ended(WorkerId("a"))
    with pytest.raises(InvariantBroken, match=r"^a request of a ended that never started, or ended twice$"):
        router.request_ended(WorkerId("a"))
    with pytest.raises(InvariantBroken, match="request of z ended that never started"):
        router.request_ended(WorkerId("z"))
    assert router.in_flight(WorkerId("a")) == 0
    assert router.in_flight(WorkerId("z")) == 0


def test_no_request_starts_at_an_engine_that_is_not_there() -> None:
    router = cluster(a=("H800", 8, 0))
    router.engine_left(WorkerId("a"))
    with pytest.raises(InvariantBroken, match=r"^a request was sent to a, which left or never joined; place"):
        router.request_started(WorkerId("a"))


def test_an_engine_that_left_is_forgotten_with_its_last_request() -> None:
    router = cluster(a=("H800", 8, 2))
    router.engine_left(WorkerId("a"))
    load(router, "a", 0)
    with pytest.raises(InvariantBroken):
        router.request_started(WorkerId("a"))


def test_news_heard_twice_or_from_strangers_changes_nothing() -> None:
    router = cluster(a=("H800", 8, 7))
    for _ in range(2):
        router.engine_joined(WorkerId("a"), "H800", 1)
        router.engine_serves(WorkerId("a"), V0)
        assert router.spare("H800") == 1
    router.engine_joined(WorkerId("a"), "H20", 8)
    assert router.spare("H20") == 0
    assert place(router, 5) == on("a", "H800")
    for worker in ("a", "a", "z"):
        router.engine_left(WorkerId(worker))
        router.engine_serves(WorkerId(worker), V2)
        assert router.spare("H800") == 0
    assert place(router) is None
    assert router.spare("B200") == 0


def test_an_engine_without_slots_is_refused() -> None:
    router = Router({})
    with pytest.raises(RequestError, match="a declares 0 slots"):
        router.engine_joined(WorkerId("a"), "H800", 0)
    router.engine_joined(WorkerId("a"), "H800", 1)


def test_the_watermark_counts_slots_of_one() -> None:
    router = cluster(a=("H800", 1, 0))
    assert router.spare("H800") == 1
    load(router, "a", 1)
    assert router.spare("H800") == 0
    load(router, "a", 2)
    assert router.spare("H800") == 0
    load(router, "a", 0)
    assert router.spare("H800") == 1


# --- any history ----------------------------------------------------------------------------------------------------

WORKERS = [WorkerId(f"e{index}") for index in range(5)]
HARDWARE = {worker: ("H800", "H20", "A10")[index % 3] for index, worker in enumerate(WORKERS)}
SLOTS = {worker: 1 + index % 3 for index, worker in enumerate(WORKERS)}
AFFINITY = {"game": GAME, "maths": TaskAffinity("H20", ("A10", "H800")), "any": TaskAffinity()}

events = st.one_of(
    st.tuples(st.just("join"), st.sampled_from(WORKERS)),
    st.tuples(st.just("join"), st.sampled_from(WORKERS)),
    st.tuples(st.just("serve"), st.sampled_from(WORKERS), st.integers(0, 3)),
    st.tuples(st.just("serve"), st.sampled_from(WORKERS), st.integers(0, 3)),
    st.tuples(st.just("leave"), st.sampled_from(WORKERS)),
    st.tuples(st.just("turn"), st.integers(0, 5)),
    st.tuples(st.just("turn"), st.integers(0, 5)),
    st.tuples(st.just("turn"), st.integers(0, 5)),
    st.tuples(st.just("reply"), st.integers(0, 5)),
    st.tuples(st.just("end"), st.integers(0, 5)),
)


@dataclass
class Model:
    """The rules, written the slow and obvious way beside a router, and checked at every event."""

    router: Router = field(default_factory=lambda: Router(AFFINITY))
    serving: dict[WorkerId, Version | None] = field(default_factory=dict)
    in_flight: dict[WorkerId, int] = field(default_factory=lambda: dict.fromkeys(WORKERS, 0))
    requests: list[tuple[int, WorkerId]] = field(default_factory=list)
    home: dict[int, WorkerId] = field(default_factory=dict)
    last: dict[int, Version] = field(default_factory=dict)
    history: list[Placement | None] = field(default_factory=list)

    def load(self, worker: WorkerId) -> float:
        return self.in_flight[worker] / SLOTS[worker]

    def able(self, hardware: str | None, at_least: Version | None) -> list[WorkerId]:
        return [
            worker
            for worker, version in self.serving.items()
            if hardware in (None, HARDWARE[worker]) and version and (at_least is None or version >= at_least)
        ]

    def apply(self, event: tuple) -> None:  # type: ignore[type-arg]
        match event:
            case ("join", worker):
                self.router.engine_joined(worker, HARDWARE[worker], SLOTS[worker])
                self.serving.setdefault(worker, None)
            case ("serve", worker, step):
                self.router.engine_serves(worker, Version(0, step))
                if worker in self.serving:
                    self.serving[worker] = max(self.serving[worker] or V0, Version(0, step))
            case ("leave", worker):
                self.router.engine_left(worker)
                self.serving.pop(worker, None)
            case ("turn", trajectory):
                self.turn(trajectory)
            case ("reply", index):
                if index < len(self.requests):
                    trajectory, worker = self.requests.pop(index)
                    self.router.request_ended(worker)
                    self.in_flight[worker] -= 1
                    if (version := self.serving.get(worker)) and self.home.get(trajectory) == worker:
                        self.last[trajectory] = version
            case ("end", trajectory):
                self.router.trajectory_ended(TrajectoryId(trajectory))
                self.home.pop(trajectory, None)
                self.last.pop(trajectory, None)
        for worker, count in self.in_flight.items():
            assert self.router.in_flight(worker) == count >= 0
        for hardware in ("H800", "H20", "A10"):
            assert self.router.spare(hardware) == sum(self.load(worker) < 1.0 for worker in self.able(hardware, None))

    def turn(self, trajectory: int) -> None:
        task = ("game", "maths", "any")[trajectory % 3]
        at_least = self.last.get(trajectory)
        placed = self.router.place(TrajectoryId(trajectory), task, at_least, 0.0)
        self.history.append(placed)
        preferred, fallback = AFFINITY[task].preferred, AFFINITY[task].fallback
        able = [w for w in self.able(None, at_least) if preferred in (None, HARDWARE[w]) or HARDWARE[w] in fallback]
        assert self.router.serves(task) == any(
            preferred in (None, HARDWARE[w]) or HARDWARE[w] in fallback for w in self.able(None, None)
        )
        if placed is None:
            assert not able, "an engine could have taken it"
            return
        worker, before = placed.decode, self.home.get(trajectory)
        assert worker in able, "it left, serves nothing, is older than the last token or not compatible"
        assert placed.hardware == HARDWARE[worker]
        at_home = self.able(preferred, at_least)
        if before in able:
            went_back = preferred is not None and HARDWARE[before] != preferred == placed.hardware
            has_room = any(self.load(w) < 1.0 for w in at_home)
            assert (worker == before) != went_back
            assert went_back == (preferred is not None and HARDWARE[before] != preferred and has_room)
        else:
            if any(self.load(w) < 2.0 for w in at_home):
                assert preferred in (None, placed.hardware), "its class had room"
            if preferred in (None, placed.hardware):
                assert placed.reason == ""
            else:
                assert placed.reason.startswith(f"{preferred} ")
                assert all(self.load(worker) < self.load(w) for w in at_home), "falls back only to what is less loaded"
        if worker != before:
            peers = [w for w in able if preferred is None or HARDWARE[w] == placed.hardware]
            assert worker == min(peers, key=self.load), "the least loaded, ties by joining (the dict's order)"
        self.home[trajectory] = worker
        self.router.request_started(worker)
        self.in_flight[worker] += 1
        self.requests.append((trajectory, worker))


@settings(max_examples=200)
@given(st.lists(events, min_size=20, max_size=80))
def test_the_rules_hold_in_any_history(history: list[tuple]) -> None:  # type: ignore[type-arg]
    model = Model()
    for event in history:
        model.apply(event)


@given(st.lists(events, max_size=40))
def test_the_same_history_gives_the_same_placements(history: list[tuple]) -> None:  # type: ignore[type-arg]
    one, other = Model(), Model()
    for event in history:
        one.apply(event)
        other.apply(event)
    assert one.history == other.history


def test_ten_thousand_trajectories_fill_five_hundred_engines_evenly() -> None:
    router = Router({"game": GAME})
    for index in range(500):
        worker = WorkerId(f"e{index}")
        router.engine_joined(worker, "H800" if index < 250 else "H20", 16)
        router.engine_serves(worker, V0)
    for trajectory in range(10_000):
        placed = place(router, trajectory)
        assert placed is not None
        router.request_started(placed.decode)
    # 8,000 fill the preferred class to its watermark of 2.0, the others go where there is room.
    counts = [router.in_flight(WorkerId(f"e{index}")) for index in range(500)]
    assert set(counts[:250]) == {32}
    assert set(counts[250:]) == {8}


# --- a preference that changes --------------------------------------------------------------------------------------


def undecided() -> Router:
    """A task without a preference yet, and an engine of each class."""
    return cluster(TaskAffinity(None, ("H800", "H20")), a=("H800", 8, 0), b=("H20", 8, 0))


def test_new_trajectories_go_to_the_class_that_is_preferred_now() -> None:
    router = undecided()
    router.prefer("game", "H20")
    assert place(router) == on("b", "H20")
    router.prefer("game", "H800")
    assert place(router, 2) == on("a", "H800")
    assert place(router) == on("b", "H20"), "it has its KV there"
    router.prefer("game", None)
    router.request_started(WorkerId("a"))
    assert place(router, 3) == on("b", "H20"), "least load"


def test_a_trajectory_that_follows_moves_once_when_there_is_room() -> None:
    router = undecided()
    assert place(router) == on("a", "H800")
    router.prefer("game", "H20")
    router.follow(TrajectoryId(1), "game")
    load(router, "b", 8)
    assert place(router) == on("a", "H800")
    load(router, "b", 7)
    assert place(router) == on("b", "H20", "H20 preferred now")
    assert place(router) == on("b", "H20")


def test_a_trajectory_does_not_follow_a_preference_of_before() -> None:
    router = undecided()
    assert place(router) == on("a", "H800")
    router.prefer("game", "H20")
    router.follow(TrajectoryId(1), "game")
    router.prefer("game", "H800")
    router.follow(TrajectoryId(1), "game")
    assert place(router) == on("a", "H800")


def test_a_trajectory_that_measures_a_class_goes_there_and_stays() -> None:
    router = undecided()
    router.prefer("game", "H800")
    probed = router.place(TrajectoryId(1), "game", None, 0.0, "H20")
    assert probed == on("b", "H20", "H20 is measured")
    assert place(router) == on("b", "H20")


def test_a_class_without_room_is_not_measured() -> None:
    router = undecided()
    router.prefer("game", "H800")
    load(router, "b", 16)
    assert router.place(TrajectoryId(1), "game", None, 0.0, "H20") == on("a", "H800")
    assert router.place(TrajectoryId(2), "game", None, 0.0, "A10") == on("a", "H800")
