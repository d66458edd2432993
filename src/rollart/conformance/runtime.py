"""Conformance of runtimes: what the listener receives about workers, in which order, and when it stops.

Cases are coroutines: run each on the event loop that the runtime lives on (`harness.run(case.run(harness))`).
"""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

from rollart.conformance.case import Case, ConformanceError, NotApplicable, Suite, check
from rollart.conformance.echo import interpreter_checksum, question
from rollart.conformance.runtime_drive import RuntimeDrive, RuntimeHarness
from rollart.types.errors import RollartError
from rollart.types.ids import WorkerId
from rollart.types.messages import RewardInfo

__all__ = ["CASES", "RuntimeHarness"]

SUITE = Suite[RuntimeHarness, Coroutine[Any, Any, None]]()


@SUITE.case
async def joined_comes_first(harness: RuntimeHarness) -> None:
    """`joined`, with the worker's own info, is the first callback about it, once; settings reach the worker."""
    async with RuntimeDrive(harness) as drive:
        worker = drive.spawn("a", slots=3)
        drive.post(worker, question("echo/1"))
        await drive.answered(worker, "echo/1")
        first = drive.of(worker)[0]
        check(first.what == "joined", f"`joined` is the first callback about a worker, but it was {first}")
        check(first.details == RewardInfo(slots=3), f"the worker's info reflects its settings, but got {first.details}")
        joined = [call for call in drive.of(worker) if call.what == "joined"]
        check(len(joined) == 1, "a worker joins once")


@SUITE.case
async def order_is_kept(harness: RuntimeHarness) -> None:
    """Commands arrive in the order of `post`, events in the order in which they were emitted, each once."""
    async with RuntimeDrive(harness) as drive:
        workers = [drive.spawn("a"), drive.spawn("b")]
        keys = [f"echo/{index}" for index in range(60)]
        for index, key in enumerate(keys):
            for worker in workers:
                drive.post(worker, question(key))
            if index % 7 == 0:
                await asyncio.sleep(0)
        for worker in workers:
            await drive.answered(worker, *keys)
        await drive.quiet()
        for worker in workers:
            got = drive.keys(worker)
            check(got == keys, f"commands and events keep their order, each once, but {worker} gave {got}")


@SUITE.case
async def commands_of_one_pass_travel_together(harness: RuntimeHarness) -> None:
    """Commands posted in one pass of the event loop reach the worker as one batch."""
    async with RuntimeDrive(harness) as drive:
        worker = drive.spawn("a")
        drive.post(worker, question("echo/first"))
        await drive.answered(worker, "echo/first")
        drive.post(worker, question("echo/1"), question("echo/2"))
        drive.post(worker, question("echo/3"))
        await drive.answered(worker, "echo/1", "echo/2", "echo/3")
        sizes = [drive.value(worker, f"echo/{index}") for index in (1, 2, 3)]
        check(sizes == [3, 3, 3], f"three commands of one pass arrive together, but came in batches of {sizes}")


@SUITE.case
async def a_worker_is_driven_at_its_wake_at(harness: RuntimeHarness) -> None:
    """The worker is driven again at its `wake_at`, without a command, and not much earlier."""
    async with RuntimeDrive(harness) as drive:
        worker = drive.spawn("a")
        start = asyncio.get_running_loop().time()  # before the command: the worker may have it at once
        drive.post(worker, question("later/long", seconds=0.2), question("later/short", seconds=0.05))
        await drive.answered(worker, "later/long", "later/short")
        took_s = asyncio.get_running_loop().time() - start
        check(drive.keys(worker) == ["later/short", "later/long"], "events come in order of due time")
        check(took_s >= 0.2 - 1e-6, f"an event that is due in 0.2 s came after {took_s:g} s")


@SUITE.case
async def wake_may_come_from_any_thread(harness: RuntimeHarness) -> None:
    """An idle worker is driven again when one of its threads calls `wake`."""
    if not harness.threads:
        raise NotApplicable("there are no threads in virtual time")
    async with RuntimeDrive(harness) as drive:
        worker = drive.spawn("a")
        keys = [f"wake/{index}" for index in range(5)]
        for key in keys:
            drive.post(worker, question(key))
            await drive.answered(worker, key)


@SUITE.case
async def a_raising_worker_dies_alone(harness: RuntimeHarness) -> None:
    """An exception in construction, `info`, `post` or `advance` is a death, reported once and last, with the reason."""
    async with RuntimeDrive(harness) as drive:
        other = drive.spawn("other")
        for place in ("construction", "info", "post", "advance"):
            worker = drive.spawn(place, fail=place)
            drive.post(worker, question(f"{place}/raise"), question("echo/after"))
            reason = await drive.death(worker)
            check("raised in" in reason, f"`died` has the error raised in {place}, but the reason is {reason!r}")
            drive.post(worker, question("echo/dead"))
            drive.post(other, question(f"echo/{place}"))
            await drive.answered(other, f"echo/{place}")
            await drive.quiet()
            callbacks = [call.what for call in drive.of(worker)]
            check(
                callbacks.count("died") == 1 and callbacks[-1] == "died",
                f"`died` is the last callback about a worker, but got {callbacks}",
            )
            if place in ("construction", "info"):
                check(callbacks == ["died"], f"a worker that was not built does not join, but got {callbacks}")


@SUITE.case
async def a_bad_factory_path_is_a_death(harness: RuntimeHarness) -> None:
    """`joined` or `died` follows every `spawn`, even if the factory does not exist; the reason names it."""
    async with RuntimeDrive(harness) as drive:
        for name, factory in (
            ("module", "rollart.no_such_module:Worker"),
            ("callable", "rollart.types.ids:NoSuchWorker"),
        ):
            worker = drive.spawn(name, factory=factory)
            reason = await drive.death(worker)
            check(factory in reason, f"`died` names the factory {factory}, but the reason is {reason!r}")


@SUITE.case
async def a_stopped_worker_is_silent(harness: RuntimeHarness) -> None:
    """After `stop` there are no callbacks about a worker, whatever it was doing; it does not die, and others
    continue."""
    async with RuntimeDrive(harness) as drive:
        other = drive.spawn("other")
        at_once = drive.spawn("at-once")
        drive.stop(at_once)
        busy = drive.spawn("busy")
        await drive.until(lambda: drive.of(busy), "`joined` follows `spawn`")
        drive.post(busy, question("later/1", seconds=harness.quiet_s / 2), question("echo/1"))
        drive.stop(busy)
        drive.stop(busy)
        drive.post(busy, question("echo/2"))
        await drive.quiet()
        await drive.quiet()
        check(not drive.of(at_once), f"`stop` ends all callbacks about a worker, but {drive.of(at_once)} came")
        callbacks = [call.what for call in drive.of(busy)]
        check(callbacks == ["joined"], f"`stop` ends all callbacks about a worker, but got {callbacks}")
        drive.post(other, question("echo/1"))
        await drive.answered(other, "echo/1")


@SUITE.case
async def workers_are_closed_once(harness: RuntimeHarness) -> None:
    """`close` is called once for every worker that was built: stopped, dead, or alive when the runtime closes."""
    async with RuntimeDrive(harness) as drive:
        stopped, dead, alive = (drive.spawn(name) for name in ("stopped", "dead", "alive"))
        for worker in (stopped, dead, alive):
            drive.post(worker, question("echo/1"))
            await drive.answered(worker, "echo/1")
        drive.post(dead, question("advance/raise"))
        await drive.death(dead)
        drive.stop(stopped)
        drive.stop(dead)
        await drive.closed(stopped)
        await drive.closed(dead)
        check(not drive.closings(alive), "a worker is closed when it ends, not before")
        await drive.runtime.close()
        await drive.closed(alive)


@SUITE.case
async def closing_ends_every_worker(harness: RuntimeHarness) -> None:
    """After `close` there are no more callbacks; no worker is reported dead, not even one that is being built."""
    async with RuntimeDrive(harness) as drive:
        worker = drive.spawn("a")
        drive.post(worker, question("echo/1"))
        await drive.answered(worker, "echo/1")
        drive.post(worker, question("later/1", seconds=harness.quiet_s / 2), question("echo/2"))
        drive.spawn("b")
        await drive.runtime.close()
        place = len(drive.calls)
        await drive.quiet()
        await drive.quiet()
        check(not drive.calls[place:], f"after `close` there are no callbacks, but {drive.calls[place:]} came")
        deaths = [call for call in drive.calls if call.what == "died"]
        check(not deaths, f"a worker that was asked to stop does not die, but {deaths} came")


@SUITE.case
async def a_worker_that_fails_to_close(harness: RuntimeHarness) -> None:
    """An error in a worker's `close` affects neither the caller of `stop` nor other workers; a death is still
    reported."""
    async with RuntimeDrive(harness) as drive:
        stopped, dead, other = (drive.spawn(name, fail="close") for name in ("stopped", "dead", "other"))
        for worker in (stopped, dead, other):
            drive.post(worker, question("echo/1"))
            await drive.answered(worker, "echo/1")
        try:
            drive.stop(stopped)
        except Exception as error:
            raise ConformanceError(f"`stop` ends a worker, but it raised the worker's error: {error!r}") from error
        drive.post(dead, question("advance/raise"))
        reason = await drive.death(dead)
        check("raised in advance" in reason, f"`died` has the cause of death, but the reason is {reason!r}")
        drive.post(other, question("echo/2"))
        await drive.answered(other, "echo/2")
        try:
            await drive.runtime.close()
        except Exception as error:
            raise ConformanceError(f"`close` ends every worker, but it raised a worker's error: {error!r}") from error


@SUITE.case
async def an_id_is_used_once(harness: RuntimeHarness) -> None:
    """The id must be new: that of a live, a stopped or a dead worker is refused with a `RollartError`."""
    async with RuntimeDrive(harness) as drive:
        alive, stopped, dead = drive.spawn("alive"), drive.spawn("stopped"), drive.spawn("dead", fail="info")
        await drive.death(dead)
        drive.stop(stopped)
        for worker in (alive, stopped, dead):
            try:
                drive.spawn(worker)
            except RollartError:
                continue
            raise ConformanceError(f"the id of a worker must be new, but {worker!r} was accepted twice")
        drive.post(alive, question("echo/1"))
        await drive.answered(alive, "echo/1")


@SUITE.case
async def the_listener_is_called_on_the_loop(harness: RuntimeHarness) -> None:
    """The listener is called on the controller's loop, never from inside a call of the runtime."""
    async with RuntimeDrive(harness) as drive:
        worker, doomed = drive.spawn("a"), drive.spawn("b", fail="construction")
        for index in range(10):
            drive.post(worker, question(f"echo/{index}"))
            await asyncio.sleep(0)
        await drive.answered(worker, "echo/9")
        await drive.death(doomed)
        drive.stop(worker)
        check(not drive.off_loop, f"the listener is called only on the loop's thread, but {drive.off_loop} was not")
        check(not drive.inside, f"the listener is never called from inside a call, but {drive.inside} was")


@SUITE.case
async def the_listener_may_act(harness: RuntimeHarness) -> None:
    """Commands may be posted from `joined`, and a replacement spawned from `died`."""
    async with RuntimeDrive(harness) as drive:
        heir = WorkerId("a.1")
        drive.on_joined = lambda worker: drive.post(worker, question("echo/hello"))

        def replace(worker: WorkerId) -> None:
            drive.stop(worker)
            drive.spawn(heir)

        drive.on_died = replace
        worker = drive.spawn("a.0")
        await drive.answered(worker, "echo/hello")
        drive.post(worker, question("advance/raise"))
        await drive.answered(heir, "echo/hello")


@SUITE.case
async def a_worker_may_have_its_own_interpreter(harness: RuntimeHarness) -> None:
    """A worker runs with the interpreter that `spawn` names; where it has no process, that is refused at once."""
    async with RuntimeDrive(harness) as drive:
        if not harness.python:
            try:
                drive.spawn("other", python=sys.executable)
            except RollartError:
                return
            raise ConformanceError("an interpreter for a worker without a process is refused, but it was taken")
        for name, python in (("other", harness.python), ("own", "")):
            worker = drive.spawn(name, python=python)
            drive.post(worker, question("python/1"))
            await drive.answered(worker, "python/1")
            expected = interpreter_checksum(python or sys.executable)
            check(
                drive.value(worker, "python/1") == expected,
                f"a worker runs with {python or 'the interpreter of the controller'}, but {name!r} did not",
            )


CASES: tuple[Case[RuntimeHarness, Coroutine[Any, Any, None]], ...] = SUITE.cases()
