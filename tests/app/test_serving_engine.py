"""The engine behind `rollart serve`: places, parts of choices, aborts, and an engine that fails."""

import asyncio

import pytest
from scripted import CONTEXT, Script, engine, sampled
from served import CONTEXT as TINY_CONTEXT
from served import direct, tiny_checkpoint

from rollart.app.serving import engine as module
from rollart.app.serving.engine import Full, NotServed, ServingEngine
from rollart.backends.engines.torch_engine import TorchEngine
from rollart.backends.stores.memory import MemoryStore
from rollart.config.pools import PoolSettings
from rollart.distributed.inline import InlineRuntime
from rollart.types.errors import WorkerLost
from rollart.types.messages import Abort, Add, FinishReason, Refused, Sampling
from rollart.types.tokens import Segment

TURN = (Segment.of([1, 2, 3]), Sampling(8, seed=5))


def run(test, **options):
    """Run a test with a scripted engine that has started."""
    script = Script()

    async def whole():
        serving = engine(script, **options)
        try:
            await serving.start()
            await test(serving, script)
        finally:
            await serving.close()

    asyncio.run(whole())


def test_parts_of_all_choices_come_in_order():
    async def test(serving, script):
        assert serving.info.max_context == CONTEXT
        generation = serving.begin([TURN, TURN])
        first, second = (add.request for add in await script.sent(Add, 2))
        script.progress(first, "ab")
        script.progress(second, "x")
        script.done(first, "c", cached=2)
        script.done(second, "", FinishReason.LENGTH)
        parts = [part async for part in generation]
        assert [(part.choice, bytes(part.tokens), part.finish, part.cached) for part in parts] == [
            (0, b"ab", None, 0),
            (1, b"x", None, 0),
            (0, b"c", FinishReason.STOP, 2),
            (1, b"", FinishReason.LENGTH, 0),
        ]
        assert parts[0].logprobs == [-1.0, -2.0]
        assert [part async for part in generation] == []

    run(test)


def test_turns_beyond_the_capacity_are_refused_until_the_engine_has_ended_one():
    async def test(serving, script):
        assert serving.capacity == 3
        generations = [serving.begin([TURN]) for _ in range(2)]
        with pytest.raises(Full):
            serving.begin([TURN, TURN])
        generations.append(serving.begin([TURN]))
        assert serving.is_full
        generations[0].close()
        (abort,) = await script.sent(Abort)
        assert serving.is_full, "the engine may still work on it"
        script.done(abort.request, "a", FinishReason.ABORTED)
        script.done((await script.sent(Add))[1].request, "b")
        assert [bytes(part.tokens) async for part in generations[1]] == [b"b"]
        assert not serving.is_full
        assert [part async for part in generations[0]] == []

    run(test)


def test_a_closed_generation_aborts_what_is_in_flight_and_only_that():
    async def test(serving, script):
        generation = serving.begin([TURN, TURN])
        adds = await script.sent(Add, 2)
        script.done(adds[0].request, "a")
        await anext(generation)
        generation.close()
        generation.close()
        assert await script.sent(Abort) == [Abort(adds[1].request)]

    run(test)


def test_a_refusal_and_a_death_reach_those_who_wait():
    async def test(serving, script):
        first, second = serving.begin([TURN]), serving.begin([TURN, TURN])
        script.report(Refused((await script.sent(Add))[0].request, "no"))
        with pytest.raises(NotServed, match="no") as refused:
            await anext(first)
        assert not refused.value.lost
        script.die(OSError("the device is gone"))
        with pytest.raises(NotServed) as failed:
            await anext(second)
        assert failed.value.lost
        assert "the device is gone" in await serving.lost
        assert serving.trouble() == "The engine has failed"
        with pytest.raises(NotServed, match="failed"):
            serving.begin([TURN])

    run(test)


def test_a_stop_fails_what_is_in_flight_and_takes_no_more():
    async def test(serving, script):
        generation = serving.begin([TURN])
        await script.sent(Add)
        serving.stop()
        with pytest.raises(NotServed, match="stopping"):
            await anext(generation)
        with pytest.raises(NotServed, match="stopping"):
            serving.begin([TURN])
        generation.close()
        await script.sent(Abort)

    run(test)


def test_an_engine_that_cannot_start():
    with pytest.raises(WorkerLost, match="could not be started: ValueError: no such weights"):
        run(None, broken=True)


def test_an_engine_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "SILENT_S", 0.05)

    async def test(serving, script):
        generation = serving.begin([TURN])
        with pytest.raises(NotServed, match="failed") as failed:
            await anext(generation)
        assert failed.value.lost
        assert "it hangs" in await serving.lost
        with pytest.raises(NotServed, match="failed"):
            serving.begin([TURN])
        # What it says and does afterwards changes nothing.
        (add,) = await script.sent(Add)
        script.done(add.request, "late")
        script.die(OSError("late"))

    run(test)


def test_an_engine_that_reports_or_has_nothing_to_do_is_not_given_up(monkeypatch):
    async def test(serving, script):
        generation = serving.begin([TURN])
        (add,) = await script.sent(Add)
        script.done(add.request, "a")
        assert [part.tokens async for part in generation] == [list(sampled("a").tokens.ids())]
        monkeypatch.setattr(module, "SILENT_S", 0.0)
        serving._watch()
        assert not serving.trouble()
        assert not serving.lost.done()

    run(test)


class RecordedEngine(TorchEngine):
    """Leaves itself to the test."""

    def __init__(self, settings, wake):
        settings = dict(settings)
        settings.pop("made").append(self)
        super().__init__(settings, wake)


def test_requests_that_come_together_are_one_batch_with_the_results_of_each_alone(tmp_path):
    folder = tiny_checkpoint(tmp_path / "tiny")
    prompts = [[number, 7, 7, 9] for number in range(32)]
    sampling = {"max_tokens": 24, "temperature": 0.0}
    made = []
    settings = {
        "made": made,
        "model": str(folder),
        "store": MemoryStore(),
        "serve_folder_as": (0, 0),
        "max_context": TINY_CONTEXT,
        "pool": PoolSettings(slots=32),
    }

    async def whole():
        factory = f"{__name__}:RecordedEngine"
        serving = ServingEngine(InlineRuntime(), settings, queue=0, factory=factory)
        try:
            await serving.start()
            turns = [(Segment.of(prompt), Sampling(**sampling)) for prompt in prompts]
            generations = [serving.begin([turn]) for turn in turns]
            return [[part async for part in generation] for generation in generations]
        finally:
            await serving.close()

    found = asyncio.run(whole())
    assert made[0].counters().largest_batch == 32
    alone = direct(folder, prompts, **sampling)
    for parts, expected in zip(found, alone, strict=True):
        assert [token for part in parts for token in part.tokens] == expected.generated.tokens.ids().tolist()
        assert parts[-1].finish is expected.finish
