"""Waits: deadlines fire once, at their time, whatever else happens; closed ones never."""

import asyncio

import pytest

from rollart.control.nursery import Nursery
from rollart.control.waits import Waits
from rollart.policy.watch import Wait
from rollart.sim.loop import run_virtual
from rollart.types.errors import EngineFault, InvariantBroken


def make() -> tuple[Waits, Nursery]:
    nursery = Nursery()
    return Waits(asyncio.get_running_loop(), nursery.boundary), nursery


def test_a_deadline_fires_once_and_at_its_time() -> None:
    fired: list[tuple[float, str]] = []

    async def main() -> None:
        waits, _ = make()
        loop = asyncio.get_running_loop()
        for owner, seconds in (("slow", 5.0), ("quick", 0.1), ("same", 5.0), ("now", 0.0)):
            waits.guard(owner, "it", seconds, "nothing", lambda wait: fired.append((loop.time(), wait.owner)))
        await asyncio.sleep(100)
        assert waits.report() == []

    run_virtual(main())
    assert fired == [(0.0, "now"), (0.1, "quick"), (5.0, "slow"), (5.0, "same")]


def test_a_closed_wait_does_not_fire_and_may_be_closed_twice() -> None:
    fired: list[str] = []

    async def main() -> None:
        waits, _ = make()
        first = waits.guard("a", "it", 1.0, "nothing", lambda wait: fired.append(wait.owner))
        waits.guard("b", "it", 2.0, "nothing", lambda wait: fired.append(wait.owner))
        waits.close(first)
        waits.close(first)
        await asyncio.sleep(10)
        waits.close(first)

    run_virtual(main())
    assert fired == ["b"]


def test_a_shorter_wait_that_comes_later_fires_first() -> None:
    fired: list[tuple[float, str]] = []

    async def main() -> None:
        waits, _ = make()
        loop = asyncio.get_running_loop()

        def note(wait: Wait) -> None:
            fired.append((loop.time(), wait.owner))

        waits.guard("long", "it", 10.0, "nothing", note)
        await asyncio.sleep(1)
        waits.guard("short", "it", 2.0, "nothing", note)
        await asyncio.sleep(50)

    run_virtual(main())
    assert fired == [(3.0, "short"), (10.0, "long")]


def test_a_wait_that_is_renewed_at_its_deadline_fires_again() -> None:
    fired: list[float] = []

    async def main() -> None:
        waits, _ = make()
        loop = asyncio.get_running_loop()

        def again(_: Wait) -> None:
            fired.append(loop.time())
            if len(fired) < 4:
                waits.guard("engine", "progress", 3.0, "look again", again)

        waits.guard("engine", "progress", 3.0, "look again", again)
        await asyncio.sleep(100)

    run_virtual(main())
    assert fired == [3.0, 6.0, 9.0, 12.0]


def test_wait_gives_the_result_or_raises_what_was_named() -> None:
    async def main() -> None:
        waits, _ = make()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        loop.call_later(2, future.set_result, 5)
        assert await waits.wait(future, "t", "a turn", 3.0, "it ends", EngineFault) == 5
        assert waits.report() == []
        with pytest.raises(EngineFault, match="t: a turn took longer than 3 s; it ends"):
            await waits.wait(loop.create_future(), "t", "a turn", 3.0, "it ends", EngineFault)
        assert loop.time() == 5.0
        assert waits.report() == []

    run_virtual(main())


def test_an_answer_at_the_very_deadline_counts_if_it_came_first() -> None:
    async def main() -> None:
        waits, _ = make()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        loop.call_at(3.0, lambda: future.done() or future.set_result(1))
        assert await waits.wait(future, "t", "a turn", 3.0, "it ends", EngineFault) == 1

    run_virtual(main())


def test_a_cancelled_wait_is_closed() -> None:
    async def main() -> None:
        waits, _ = make()
        loop = asyncio.get_running_loop()
        task = loop.create_task(waits.wait(loop.create_future(), "t", "a turn", 3.0, "it ends", EngineFault))
        await asyncio.sleep(1)
        assert len(waits.report()) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert waits.report() == []

    run_virtual(main())


def test_an_action_that_fails_ends_the_run_and_does_not_take_the_other_deadlines_with_it() -> None:
    fired: list[str] = []

    async def scenario() -> None:
        waits, nursery = make()

        def broken(_: Wait) -> None:
            raise InvariantBroken("in an action")

        async def main() -> None:
            waits.guard("a", "it", 1.0, "breaks", broken)
            waits.guard("b", "it", 1.0, "nothing", lambda wait: fired.append(wait.owner))
            waits.guard("c", "it", 2.0, "nothing", lambda wait: fired.append(wait.owner))
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(5)

        await nursery.run(main())

    with pytest.raises(InvariantBroken, match="in an action"):
        run_virtual(scenario())
    assert fired == ["b", "c"]


def test_a_wait_without_an_owner_or_a_deadline_is_refused() -> None:
    async def main() -> None:
        waits, _ = make()
        for owner, seconds in (("", 1.0), ("a", float("inf")), ("a", -1.0)):
            with pytest.raises(InvariantBroken):
                waits.guard(owner, "it", seconds, "nothing", lambda _: None)

    run_virtual(main())
