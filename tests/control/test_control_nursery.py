"""The nursery: who is cancelled when, which error counts, and that nothing outlives it."""

import asyncio
from typing import Any

import pytest

from rollart.control.nursery import Nursery
from rollart.sim.loop import run_virtual


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def fails(after_s: float, error: Exception) -> None:
    await asyncio.sleep(after_s)
    raise error


def test_the_result_of_main_is_the_result() -> None:
    async def main() -> int:
        await asyncio.sleep(1)
        return 7

    async def scenario() -> int:
        return await Nursery().run(main())

    assert run_virtual(scenario()) == 7


def test_children_are_cancelled_in_the_order_of_their_start_each_before_the_next() -> None:
    log: list[str] = []

    async def child(name: str) -> None:
        try:
            await forever()
        finally:
            log.append(f"{name} ends")
            await asyncio.sleep(1)
            log.append(f"{name} ended")

    async def scenario() -> None:
        nursery = Nursery()

        async def main() -> None:
            for name in "cab":
                nursery.start(child(name), name)
            await asyncio.sleep(1)

        await nursery.run(main())
        assert len(nursery) == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(scenario())
    assert log == [f"{name} {what}" for name in "cab" for what in ("ends", "ended")]


def raised(*children: tuple[float, str], main_s: float = 100.0, main_error: Exception | None = None) -> str:
    """What `run` raises when children fail at these times; empty if nothing."""

    async def scenario() -> None:
        nursery = Nursery()

        async def main() -> None:
            for after_s, name in children:
                nursery.start(fails(after_s, ValueError(name)), name)
            await asyncio.sleep(main_s)
            if main_error is not None:
                raise main_error

        await nursery.run(main())

    try:
        run_virtual(scenario())
    except ValueError as error:
        return str(error)
    return ""


def test_the_first_error_wins() -> None:
    assert raised((3, "late"), (1, "early"), (2, "between")) == "early"
    assert raised((5, "a child's"), main_s=2, main_error=ValueError("main's")) == "main's"


def test_an_error_in_the_moment_in_which_main_returns_is_not_lost() -> None:
    assert raised((2, "just now"), main_s=2) == "just now"


def test_an_error_on_the_way_out_is_not_lost() -> None:
    async def scenario() -> None:
        nursery = Nursery()

        async def child() -> None:
            try:
                await forever()
            finally:
                raise ValueError("while ending")

        async def main() -> None:
            nursery.start(child(), "child")
            await asyncio.sleep(1)

        await nursery.run(main())

    with pytest.raises(ValueError, match="while ending"):
        run_virtual(scenario())


def test_what_main_makes_of_its_cancellation_does_not_hide_the_error() -> None:
    async def scenario() -> None:
        nursery = Nursery()

        async def main() -> None:
            nursery.start(fails(1, ValueError("the cause")), "child")
            try:
                await forever()
            finally:
                raise KeyError("a consequence")

        await nursery.run(main())

    with pytest.raises(ValueError, match="the cause"):
        run_virtual(scenario())


def test_fail_ends_the_run_from_outside() -> None:
    async def scenario() -> None:
        nursery = Nursery()
        asyncio.get_running_loop().call_later(2, nursery.fail, ValueError("told"))
        asyncio.get_running_loop().call_later(3, nursery.fail, ValueError("told again"))
        await nursery.run(forever())

    with pytest.raises(ValueError, match=r"^told$"):
        run_virtual(scenario())


def test_a_cancellation_from_outside_stays_one_and_ends_the_children() -> None:
    ended: list[str] = []

    async def child() -> None:
        try:
            await forever()
        finally:
            ended.append("child")

    async def scenario() -> None:
        nursery = Nursery()

        async def main() -> None:
            nursery.start(child(), "child")
            await forever()

        task = asyncio.create_task(nursery.run(main()))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(scenario())
    assert ended == ["child"]


def test_a_child_that_starts_another_while_it_ends_leaves_nothing_behind() -> None:
    async def scenario() -> set[asyncio.Task[Any]]:
        nursery = Nursery()

        async def child() -> None:
            try:
                await forever()
            finally:
                nursery.start(forever(), "grandchild")

        async def main() -> None:
            nursery.start(child(), "child")
            await asyncio.sleep(1)

        await nursery.run(main())
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    assert run_virtual(scenario()) == set()


def test_an_error_inside_the_boundary_ends_the_run_and_goes_no_further() -> None:
    async def scenario() -> None:
        nursery = Nursery()

        def callback() -> None:
            with nursery.boundary:
                raise ValueError("in a callback")

        asyncio.get_running_loop().call_later(1, callback)
        await nursery.run(forever())

    with pytest.raises(ValueError, match="in a callback"):
        run_virtual(scenario())
