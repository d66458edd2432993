"""The callback of a step may end the run, in order, in every mode."""

import asyncio

import pytest
from audit import sound
from worlds import MODES, run, world

from rollart.types.errors import CallbackFailed
from rollart.types.failures import StopReason
from rollart.types.journal import CheckpointSaved, RunEnded, StepTrained


def answers(*given: str | Exception | None) -> "tuple[list[int], object]":
    """The steps that a callback was called with, and the callback, which gives these answers in turn."""
    called: list[int] = []

    def on_step(step: int) -> "asyncio.Future[str | None]":
        called.append(step)
        answer = given[len(called) - 1]
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        settle = future.set_exception if isinstance(answer, Exception) else future.set_result
        asyncio.get_running_loop().call_later(5.0, settle, answer)
        return future

    return called, on_step


@pytest.mark.parametrize("mode", MODES)
def test_a_step_may_be_the_last(mode: str) -> None:
    called, on_step = answers(None, "solved")
    ran = run(world(f"mode={mode}", "eval_every=2", "tasks.game.eval_episodes=2"), on_step=on_step)  # type: ignore[arg-type]
    sound(ran)
    assert ran.error is None
    assert called == [1, 2]
    assert [event.version.step for event in ran.of(StepTrained)] == [1, 2]
    assert [event.version.step for event in ran.of(CheckpointSaved)] == [2]
    (ended,) = ran.of(RunEnded)
    assert (ended.steps, ended.stop) == (2, StopReason.DONE)
    assert ended.reason == "stopped by on_step after step 2: solved"


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_the_callback_ends_the_run_by_name(mode: str) -> None:
    called, on_step = answers(None, CallbackFailed("watch raised"))
    ran = run(world(f"mode={mode}"), on_step=on_step)  # type: ignore[arg-type]
    sound(ran)
    assert isinstance(ran.error, CallbackFailed)
    assert called == [1, 2]


def test_a_callback_that_does_not_return_ends_the_run_at_its_deadline() -> None:
    _, on_step = answers(None, None, None, None)
    ran = run(world("deadlines.on_step_s=4"), on_step=on_step)  # type: ignore[arg-type]
    sound(ran)
    assert isinstance(ran.error, CallbackFailed)
    assert "the callback of step 1 took longer than 4 s" in str(ran.error)
