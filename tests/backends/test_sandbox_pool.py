"""The warm pool: pacing, back-off, adoption. What is made here are numbers, when the test allows it."""

import threading
from collections.abc import Callable, Iterator

import pytest

from rollart.backends.sandboxes import pool as module
from rollart.backends.sandboxes.pool import ATTEMPTS, WarmPool
from rollart.types.errors import SandboxFault, SandboxUnavailable
from rollart.types.failures import FailureKind

WAIT_S = 60.0


class Workshop:
    """Makes numbers; records who was at it at the same time, and what was discarded."""

    def __init__(self) -> None:
        self.allowed = threading.Semaphore(0)
        self.errors: list[Exception] = []
        self.made = 0
        self.busy = 0
        self.most_busy = 0
        self.discarded: list[int] = []
        self.broken: set[int] = set()
        self._changed = threading.Condition()

    def make(self, _: str) -> int:
        with self._changed:
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
            self._changed.notify_all()
        self.allowed.acquire()
        with self._changed:
            self.busy -= 1
            self._changed.notify_all()
            if self.errors:
                raise self.errors.pop(0)
            self.made += 1
            return self.made

    def until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S)

    def discard(self, number: int) -> None:
        with self._changed:
            self.discarded.append(number)
            self._changed.notify_all()

    def usable(self, number: int) -> bool:
        return number not in self.broken


@pytest.fixture
def workshop() -> Workshop:
    return Workshop()


@pytest.fixture
def pools(workshop: Workshop) -> Iterator[list[WarmPool[str, int]]]:
    made: list[WarmPool[str, int]] = []
    yield made
    for _ in range(1000):
        workshop.allowed.release()
    for pool in made:
        pool.close()


def start(workshop: Workshop, pools: list[WarmPool[str, int]], *, warm: int, makers: int) -> WarmPool[str, int]:
    pools.append(WarmPool(workshop.make, workshop.discard, workshop.usable, warm=warm, makers=makers, name="test"))
    return pools[0]


def in_threads(pool: WarmPool[str, int], count: int) -> tuple[list[threading.Thread], list[object]]:
    results: list[object] = []

    def take() -> None:
        try:
            results.append(pool.take("key", WAIT_S))
        except (SandboxFault, SandboxUnavailable) as error:
            results.append(error)

    threads = [threading.Thread(target=take) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


def test_creation_is_paced(workshop: Workshop, pools: list[WarmPool[str, int]]) -> None:
    pool = start(workshop, pools, warm=0, makers=3)
    threads, results = in_threads(pool, 10)
    workshop.until(lambda: workshop.busy == 3)
    for _ in range(10):
        workshop.allowed.release()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(results) == list(range(1, 11))
    assert workshop.most_busy == 3


def test_what_is_ready_too_late_is_adopted(workshop: Workshop, pools: list[WarmPool[str, int]]) -> None:
    pool = start(workshop, pools, warm=1, makers=1)
    with pytest.raises(SandboxFault) as caught:
        pool.take("key", 0.0)
    assert caught.value.kind is FailureKind.DEADLINE
    workshop.until(lambda: workshop.busy == 1)
    workshop.allowed.release()
    assert pool.take("key", WAIT_S) == 1
    assert workshop.discarded == []


def test_what_is_ready_too_late_and_not_wanted_is_discarded(
    workshop: Workshop, pools: list[WarmPool[str, int]]
) -> None:
    pool = start(workshop, pools, warm=0, makers=1)
    threads, results = in_threads(pool, 1)
    workshop.until(lambda: workshop.busy == 1)
    with pytest.raises(SandboxFault):
        pool.take("key", 0.0)
    for _ in range(2):
        workshop.allowed.release()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(results) == 1
    pool.close()
    assert workshop.made == len(results) + len(workshop.discarded)


def test_failures_are_retried_and_then_told(
    workshop: Workshop, pools: list[WarmPool[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.001)
    pool = start(workshop, pools, warm=0, makers=1)
    for _ in range(100):
        workshop.allowed.release()
    workshop.errors = [SandboxFault("once"), SandboxFault("twice")]
    assert pool.take("key", WAIT_S) == 1
    workshop.errors = [SandboxFault(str(number)) for number in range(ATTEMPTS)]
    with pytest.raises(SandboxFault, match=str(ATTEMPTS - 1)):
        pool.take("key", WAIT_S)
    assert pool.take("key", WAIT_S) == 2


def test_an_error_of_the_system_is_retried_too(
    workshop: Workshop, pools: list[WarmPool[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end the maker, and with the last one the pool."""
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.001)
    pool = start(workshop, pools, warm=0, makers=1)
    for _ in range(100):
        workshop.allowed.release()
    workshop.errors = [OSError("too many open files")]
    assert pool.take("key", WAIT_S) == 1
    workshop.errors = [OSError(str(number)) for number in range(ATTEMPTS)]
    with pytest.raises(SandboxFault, match=str(ATTEMPTS - 1)):
        pool.take("key", WAIT_S)


def test_what_can_never_work_is_told_at_once(workshop: Workshop, pools: list[WarmPool[str, int]]) -> None:
    pool = start(workshop, pools, warm=2, makers=1)
    workshop.errors = [SandboxUnavailable("no bubblewrap")]
    workshop.allowed.release()
    with pytest.raises(SandboxUnavailable, match="bubblewrap"):
        pool.take("key", WAIT_S)


def test_a_ready_one_that_died_is_not_handed_out(workshop: Workshop, pools: list[WarmPool[str, int]]) -> None:
    pool = start(workshop, pools, warm=1, makers=1)
    workshop.broken = {2}
    for _ in range(3):
        workshop.allowed.release()
    assert pool.take("key", WAIT_S) == 1
    assert pool.take("key", WAIT_S) == 3
    assert workshop.discarded == [2]


def test_closing_discards_what_is_ready_and_ends_waits(workshop: Workshop, pools: list[WarmPool[str, int]]) -> None:
    pool = start(workshop, pools, warm=0, makers=1)
    threads, results = in_threads(pool, 2)
    workshop.until(lambda: workshop.busy == 1)
    closer = threading.Thread(target=pool.close)
    closer.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert all(isinstance(result, SandboxFault) for result in results)
    workshop.allowed.release()
    closer.join(WAIT_S)
    assert workshop.discarded == [1]


def test_callers_are_served_in_the_order_in_which_they_came(
    workshop: Workshop, pools: list[WarmPool[str, int]]
) -> None:
    """Nobody waits for those who came later, which is what bounds the longest wait in a storm."""
    pool = start(workshop, pools, warm=0, makers=2)
    served: list[tuple[int, int]] = []

    def take(number: int) -> None:
        served.append((number, pool.take("key", WAIT_S)))

    threads = []
    for number in range(12):
        threads.append(threading.Thread(target=take, args=(number,)))
        threads[-1].start()
        while len(pool._shelves["key"].waiting) <= number if "key" in pool._shelves else True:
            threading.Event().wait(0.001)
    for _ in range(12):
        workshop.allowed.release()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(served) == [(number, number + 1) for number in range(12)]


def test_a_thousand_callers_at_once_and_none_fails(workshop: Workshop, pools: list[WarmPool[str, int]]) -> None:
    """Row 11, with failures on the way: creation is paced, and retried."""
    pool = start(workshop, pools, warm=2, makers=4)
    workshop.errors = [SandboxFault("the machine is busy")] * (ATTEMPTS - 1)
    threads, results = in_threads(pool, 1000)
    for _ in range(1100):
        workshop.allowed.release()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(set(results)) == 1000
    assert all(isinstance(each, int) for each in results)
    assert workshop.most_busy <= 4
    pool.close()
    assert workshop.made == 1000 + len(workshop.discarded)


def test_one_who_gives_up_does_not_take_the_turn_of_another(
    workshop: Workshop, pools: list[WarmPool[str, int]]
) -> None:
    pool = start(workshop, pools, warm=0, makers=1)
    with pytest.raises(SandboxFault):
        pool.take("key", 0.0)
    threads, results = in_threads(pool, 2)
    for _ in range(3):
        workshop.allowed.release()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(set(results)) == 2
    assert all(isinstance(each, int) for each in results)


def test_nothing_is_kept_warm_of_what_is_needed_once() -> None:
    made: list[str] = []

    def make(key: str) -> str:
        made.append(key)
        return key

    pool = WarmPool[str, str](make, lambda _: None, lambda _: True, warm=2, makers=1, name="once")
    assert pool.take("state", 60.0, warm=False) == "state"
    assert pool.take("spec", 60.0) == "spec"
    while pool.ready("spec") < 2:
        assert pool.take("other", 60.0, warm=False) == "other"  # gives the maker time, however slow it is
    assert made.count("state") == 1
    pool.drop(lambda key: key == "spec")
    assert pool.take("other", 60.0, warm=False) == "other"
    assert pool.ready("spec") == 0
    pool.close()
