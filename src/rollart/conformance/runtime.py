"""Conformance of runtimes: what the listener receives about workers, in which order, and when it stops.

Cases are coroutines: run each on the event loop that the runtime lives on (`harness.run(case.run(harness))`).
"""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

from rollart.conformance.case import Case, ConformanceError, NotApplicable, Suite, check
from rollart.conformance.echo import interpreter_checksum, question
from rollart.conformance.runtime_audience import Audience, RuntimeHarness
from rollart.types.errors import RollartError
from rollart.types.ids import WorkerId
from rollart.types.messages import RewardInfo

__all__ = ["CASES", "RuntimeHarness"]

SUITE = Suite[RuntimeHarness, Coroutine[Any, Any, None]]()


@SUITE.case
async def joined_comes_first(harness: RuntimeHarness) -> None:
    """`joined`, with the worker's own info, is the first callback about it, once; settings reach the worker."""
    async with Audience(harness) as audience:
        worker = audience.spawn("a", slots=3)
        audience.post(worker, question("echo/1"))
        await audience.answered(worker, "echo/1")
        first = audience.of(worker)[0]
        check(first.what == "joined", f"`joined` is the first callback about a worker, but it was {first}")
        check(first.details == RewardInfo(slots=3), f"the worker's info reflects its settings, but got {first.details}")
        joined = [heard for heard in audience.of(worker) if heard.what == "joined"]
        check(len(joined) == 1, "a worker joins once")


@SUITE.case
async def order_is_kept(harness: RuntimeHarness) -> None:
    """Commands arrive in the order of `post`, events in the order in which they were emitted, each once."""
    async with Audience(harness) as audience:
        workers = [audience.spawn("a"), audience.spawn("b")]
        keys = [f"echo/{index}" for index in range(60)]
        for index, key in enumerate(keys):
            for worker in workers:
                audience.post(worker, question(key))
            if index % 7 == 0:
                await asyncio.sleep(0)
        for worker in workers:
            await audience.answered(worker, *keys)
        await audience.quiet()
        for worker in workers:
            got = audience.keys(worker)
            check(got == keys, f"commands and events keep their order, each once, but {worker} gave {got}")


@SUITE.case
async def commands_of_one_pass_travel_together(harness: RuntimeHarness) -> None:
    """Commands posted in one pass of the event loop reach the worker as one batch."""
    async with Audience(harness) as audience:
        worker = audience.spawn("a")
        audience.post(worker, question("echo/first"))
        await audience.answered(worker, "echo/first")
        audience.post(worker, question("echo/1"), question("echo/2"))
        audience.post(worker, question("echo/3"))
        await audience.answered(worker, "echo/1", "echo/2", "echo/3")
        sizes = [audience.value(worker, f"echo/{index}") for index in (1, 2, 3)]
        check(sizes == [3, 3, 3], f"three commands of one pass arrive together, but came in batches of {sizes}")


@SUITE.case
async def a_worker_is_driven_at_its_wake_at(harness: RuntimeHarness) -> None:
    """The worker is driven again at its `wake_at`, without a command, and not much earlier."""
    async with Audience(harness) as audience:
        worker = audience.spawn("a")
        start = asyncio.get_running_loop().time()  # before the command: the worker may have it at once
        audience.post(worker, question("later/long", seconds=0.2), question("later/short", seconds=0.05))
        await audience.answered(worker, "later/long", "later/short")
        took_s = asyncio.get_running_loop().time() - start
        check(audience.keys(worker) == ["later/short", "later/long"], "events come in order of due time")
        check(took_s >= 0.2 - 1e-6, f"an event that is due in 0.2 s came after {took_s:g} s")


@SUITE.case
async def wake_may_come_from_any_thread(harness: RuntimeHarness) -> None:
    """An idle worker is driven again when one of its threads calls `wake`."""
    if not harness.threads:
        raise NotApplicable("there are no threads in virtual time")
    async with Audience(harness) as audience:
        worker = audience.spawn("a")
        keys = [f"wake/{index}" for index in range(5)]
        for key in keys:
            audience.post(worker, question(key))
            await audience.answered(worker, key)


@SUITE.case
async def a_raising_worker_dies_alone(harness: RuntimeHarness) -> None:
    """An exception in construction, `info`, `post` or `advance` is a death, reported once and last, with the reason."""
    async with Audience(harness) as audience:
        other = audience.spawn("other")
        for place in ("construction", "info", "post", "advance"):
            worker = audience.spawn(place, fail=place)
            audience.post(worker, question(f"{place}/raise"), question("echo/after"))
            reason = await audience.death(worker)
            check("raised in" in reason, f"`died` has the error raised in {place}, but the reason is {reason!r}")
            audience.post(worker, question("echo/dead"))
            audience.post(other, question(f"echo/{place}"))
            await audience.answered(other, f"echo/{place}")
            await audience.quiet()
            callbacks = [heard.what for heard in audience.of(worker)]
            check(
                callbacks.count("died") == 1 and callbacks[-1] == "died",
                f"`died` is the last callback about a worker, but got {callbacks}",
            )
            if place in ("construction", "info"):
                check(callbacks == ["died"], f"a worker that was not built does not join, but got {callbacks}")


@SUITE.case
async def a_bad_factory_path_is_a_death(harness: RuntimeHarness) -> None:
    """`joined` or `died` follows every `spawn`, even if the factory does not exist; the reason names it."""
    async with Audience(harness) as audience:
        for name, factory in (
            ("module", "rollart.no_such_module:Worker"),
            ("callable", "rollart.types.ids:NoSuchWorker"),
        ):
            worker = audience.spawn(name, factory=factory)
            reason = await audience.death(worker)
            check(factory in reason, f"`died` names the factory {factory}, but the reason is {reason!r}")


@SUITE.case
async def a_stopped_worker_is_silent(harness: RuntimeHarness) -> None:
    """After `stop` there are no callbacks about a worker, whatever it was doing; it does not die, and others
    continue."""
    async with Audience(harness) as audience:
        other = audience.spawn("other")
        at_once = audience.spawn("at-once")
        audience.stop(at_once)
        busy = audience.spawn("busy")
        await audience.until(lambda: audience.of(busy), "`joined` follows `spawn`")
        audience.post(busy, question("later/1", seconds=harness.quiet_s / 2), question("echo/1"))
        audience.stop(busy)
        audience.stop(busy)
        audience.post(busy, question("echo/2"))
        await audience.quiet()
        await audience.quiet()
        check(not audience.of(at_once), f"`stop` ends all callbacks about a worker, but {audience.of(at_once)} came")
        callbacks = [heard.what for heard in audience.of(busy)]
        check(callbacks == ["joined"], f"`stop` ends all callbacks about a worker, but got {callbacks}")
        audience.post(other, question("echo/1"))
        await audience.answered(other, "echo/1")


@SUITE.case
async def workers_are_closed_once(harness: RuntimeHarness) -> None:
    """`close` is called once for every worker that was built: stopped, dead, or alive when the runtime closes."""
    async with Audience(harness) as audience:
        stopped, dead, alive = (audience.spawn(name) for name in ("stopped", "dead", "alive"))
        for worker in (stopped, dead, alive):
            audience.post(worker, question("echo/1"))
            await audience.answered(worker, "echo/1")
        audience.post(dead, question("advance/raise"))
        await audience.death(dead)
        audience.stop(stopped)
        audience.stop(dead)
        await audience.closed(stopped)
        await audience.closed(dead)
        check(not audience.closings(alive), "a worker is closed when it ends, not before")
        await audience.runtime.close()
        await audience.closed(alive)


@SUITE.case
async def closing_ends_every_worker(harness: RuntimeHarness) -> None:
    """After `close` there are no more callbacks; no worker is reported dead, not even one that is being built."""
    async with Audience(harness) as audience:
        worker = audience.spawn("a")
        audience.post(worker, question("echo/1"))
        await audience.answered(worker, "echo/1")
        audience.post(worker, question("later/1", seconds=harness.quiet_s / 2), question("echo/2"))
        audience.spawn("b")
        await audience.runtime.close()
        place = len(audience.heard)
        await audience.quiet()
        await audience.quiet()
        check(not audience.heard[place:], f"after `close` there are no callbacks, but {audience.heard[place:]} came")
        deaths = [heard for heard in audience.heard if heard.what == "died"]
        check(not deaths, f"a worker that was asked to stop does not die, but {deaths} came")


@SUITE.case
async def a_worker_that_fails_to_close(harness: RuntimeHarness) -> None:
    """An error in a worker's `close` affects neither the caller of `stop` nor other workers; a death is still
    reported."""
    async with Audience(harness) as audience:
        stopped, dead, other = (audience.spawn(name, fail="close") for name in ("stopped", "dead", "other"))
        for worker in (stopped, dead, other):
            audience.post(worker, question("echo/1"))
            await audience.answered(worker, "echo/1")
        try:
            audience.stop(stopped)
        except Exception as error:
            raise ConformanceError(f"`stop` ends a worker, but it raised the worker's error: {error!r}") from error
        audience.post(dead, question("advance/raise"))
        reason = await audience.death(dead)
        check("raised in advance" in reason, f"`died` has the cause of death, but the reason is {reason!r}")
        audience.post(other, question("echo/2"))
        await audience.answered(other, "echo/2")
        try:
            await audience.runtime.close()
        except Exception as error:
            raise ConformanceError(f"`close` ends every worker, but it raised a worker's error: {error!r}") from error


@SUITE.case
async def an_id_is_used_once(harness: RuntimeHarness) -> None:
    """The id must be new: that of a live, a stopped or a dead worker is refused with a `RollartError`."""
    async with Audience(harness) as audience:
        alive, stopped, dead = audience.spawn("alive"), audience.spawn("stopped"), audience.spawn("dead", fail="info")
        await audience.death(dead)
        audience.stop(stopped)
        for worker in (alive, stopped, dead):
            try:
                audience.spawn(worker)
            except RollartError:
                continue
            raise ConformanceError(f"the id of a worker must be new, but {worker!r} was accepted twice")
        audience.post(alive, question("echo/1"))
        await audience.answered(alive, "echo/1")


@SUITE.case
async def the_listener_is_called_on_the_loop(harness: RuntimeHarness) -> None:
    """The listener is called on the controller's loop, never from inside a call of the runtime."""
    async with Audience(harness) as audience:
        worker, doomed = audience.spawn("a"), audience.spawn("b", fail="construction")
        for index in range(10):
            audience.post(worker, question(f"echo/{index}"))
            await asyncio.sleep(0)
        await audience.answered(worker, "echo/9")
        await audience.death(doomed)
        audience.stop(worker)
        check(
            not audience.off_loop, f"the listener is called only on the loop's thread, but {audience.off_loop} was not"
        )
        check(not audience.inside, f"the listener is never called from inside a call, but {audience.inside} was")


@SUITE.case
async def the_listener_may_act(harness: RuntimeHarness) -> None:
    """Commands may be posted from `joined`, and a replacement spawned from `died`."""
    async with Audience(harness) as audience:
        heir = WorkerId("a.1")
        audience.on_joined = lambda worker: audience.post(worker, question("echo/hello"))

        def replace(worker: WorkerId) -> None:
            audience.stop(worker)
            audience.spawn(heir)

        audience.on_died = replace
        worker = audience.spawn("a.0")
        await audience.answered(worker, "echo/hello")
        audience.post(worker, question("advance/raise"))
        await audience.answered(heir, "echo/hello")


@SUITE.case
async def a_worker_may_have_its_own_interpreter(harness: RuntimeHarness) -> None:
    """A worker runs with the interpreter that `spawn` names; where it has no process, that is refused at once."""
    async with Audience(harness) as audience:
        if not harness.python:
            try:
                audience.spawn("other", python=sys.executable)
            except RollartError:
                return
            raise ConformanceError("an interpreter for a worker without a process is refused, but it was taken")
        for name, python in (("other", harness.python), ("own", "")):
            worker = audience.spawn(name, python=python)
            audience.post(worker, question("python/1"))
            await audience.answered(worker, "python/1")
            expected = interpreter_checksum(python or sys.executable)
            check(
                audience.value(worker, "python/1") == expected,
                f"a worker runs with {python or 'the interpreter of the controller'}, but {name!r} did not",
            )


CASES: tuple[Case[RuntimeHarness, Coroutine[Any, Any, None]], ...] = SUITE.cases()
