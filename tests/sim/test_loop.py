"""The virtual loop: time jumps exactly, order depends on the program alone, and a deadlock is an error with names."""

import asyncio
import math
import time

import pytest

from rollart.sim.loop import VirtualDeadlock, VirtualLoop, run_virtual
from rollart.types.errors import StalledRun


def test_time_begins_at_zero_and_jumps_exactly() -> None:
    seen: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for seconds in (0.1, 0.2, 1e-9, 12345.678):
            seen.append(loop.time())
            loop.call_at(loop.time() + seconds, lambda: None)
            await asyncio.sleep(seconds)
        seen.append(loop.time())

    run_virtual(main())
    assert seen == [0.0, 0.1, 0.1 + 0.2, 0.1 + 0.2 + 1e-9, 0.1 + 0.2 + 1e-9 + 12345.678]


def test_a_timer_runs_at_its_moment_and_never_before() -> None:
    ran: list[tuple[float, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        moments = [1.0, math.nextafter(1.0, 2.0), math.nextafter(1.0, 0.0), 1.0 + 1e-12]
        for moment in moments:
            loop.call_at(moment, lambda due=moment: ran.append((due, loop.time())))
        await asyncio.sleep(2)

    run_virtual(main())
    assert [due for due, _ in ran] == sorted(due for due, _ in ran)
    assert all(due == at for due, at in ran)


def test_years_pass_in_no_time() -> None:
    began = time.monotonic()

    async def main() -> float:
        for _ in range(100):
            await asyncio.sleep(365 * 86_400)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 100 * 365 * 86_400
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("start", [1e6, 1e9, 2.0**40, 1e15])
def test_timers_run_at_large_times_too(start: float) -> None:
    """Where the clock's step is larger than any fixed resolution, and smaller."""
    ran: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(start)
        loop.call_at(math.nextafter(start, math.inf), lambda: ran.append(loop.time()))
        loop.call_at(start, lambda: ran.append(loop.time()))
        await asyncio.sleep(10)

    run_virtual(main())
    assert ran == [start, math.nextafter(start, math.inf)]


def test_callbacks_of_one_pass_run_in_the_order_in_which_they_were_asked_for() -> None:
    ran: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_soon(ran.append, number)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    run_virtual(main())
    assert ran == list(range(50))


def order_of_equal_timers(count: int) -> list[int]:
    ran: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(count):
            loop.call_at(1.0, ran.append, number)
        await asyncio.sleep(2)

    run_virtual(main())
    return ran


def test_equal_timers_all_run_and_in_the_same_order_every_time() -> None:
    first = order_of_equal_timers(100)
    assert sorted(first) == list(range(100))
    assert order_of_equal_timers(100) == first


def test_equal_timers_run_in_the_order_in_which_they_were_set() -> None:
    assert order_of_equal_timers(100) == list(range(100))


def test_cancelled_timers_do_not_run_and_do_not_move_the_clock() -> None:
    ran: list[str] = []

    async def main() -> float:
        loop = asyncio.get_running_loop()
        handles = [loop.call_later(5 + number, ran.append, "cancelled") for number in range(200)]
        loop.call_later(3, ran.append, "kept")
        for handle in handles:
            handle.cancel()
        await asyncio.sleep(4)
        return loop.time()

    assert run_virtual(main()) == 4.0
    assert ran == ["kept"]


def test_a_deadlock_is_an_error_that_names_the_tasks() -> None:
    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        await asyncio.sleep(2.5)
        tasks = [asyncio.create_task(stuck(), name="trajectory-7"), asyncio.create_task(stuck(), name="train-3")]
        await tasks[0]
        await tasks[1]

    with pytest.raises(VirtualDeadlock, match=r"2\.500 s.*train-3, trajectory-7") as caught:
        run_virtual(main())
    assert isinstance(caught.value, StalledRun)


def test_a_cancelled_last_timer_is_a_deadlock_not_a_hang() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        timer = loop.call_later(10, future.set_result, None)
        loop.call_later(5, timer.cancel)
        await future

    with pytest.raises(VirtualDeadlock, match=r"5\.000 s"):
        run_virtual(main())


def test_what_main_leaves_behind_is_cancelled_in_the_order_of_names_and_its_finally_blocks_run() -> None:
    ended: list[str] = []

    async def child(name: str) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.kept = [loop.create_task(child(name), name=name) for name in "bca"]  # type: ignore[attr-defined]
        await asyncio.sleep(1)

    run_virtual(main())
    assert ended == ["a", "b", "c"]


def test_an_error_of_main_comes_out() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise ValueError("of main")

    with pytest.raises(ValueError, match="of main"):
        run_virtual(main())


def test_threadsafe_calls_are_ordinary_ones() -> None:
    ran: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.call_soon_threadsafe(ran.append, 1)
        await asyncio.sleep(0)

    run_virtual(main())
    assert ran == [1]
