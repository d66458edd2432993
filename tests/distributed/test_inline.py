import asyncio
import itertools
import logging
import threading
import time

import pytest

from rollart.distributed.inline import InlineRuntime
from rollart.ports.factory import load
from rollart.ports.worker import Advance
from rollart.types.errors import InvariantBroken, RequestError
from rollart.types.messages import Abort, EndSession, PrefixMiss, Resume, RewardInfo, Role, Suspend

GATE = threading.Event()
MADE = []


class Clerk:
    """Answers every `Abort(n)` with `PrefixMiss(n)`; the settings make it misbehave."""

    def __init__(self, settings, wake):
        self.settings = settings
        self.wake = wake
        self.thread = threading.current_thread()
        self.batches = []
        self.advances = []
        self.closes = 0
        self.hanging = threading.Event()
        MADE.append(self)
        self.misbehave("init")

    def misbehave(self, where):
        match self.settings.get(where):
            case "raise":
                raise ValueError(f"in {where}")
            case "exit":
                raise SystemExit(1)
            case "hang":
                self.hanging.set()
                GATE.wait(100)

    def info(self):
        self.misbehave("info")
        return RewardInfo(self.settings.get("slots", 1))

    def post(self, commands):
        assert threading.current_thread() is self.thread
        self.batches.append(list(commands))
        if commands[0] != Resume():
            self.misbehave("post")

    def advance(self, now):
        assert threading.current_thread() is self.thread
        self.advances.append(now)
        if any(Suspend() in batch for batch in self.batches):
            self.misbehave("advance")
        if self.settings.get("beat") and len(self.advances) < 6:
            return Advance([], now + 0.02)
        if self.settings.get("signal"):
            # Woken from another thread, once, with an event to report.
            if len(self.advances) == 1:
                threading.Timer(0.02, self.wake).start()
            return Advance([PrefixMiss(77)] if len(self.advances) == 2 else [], None)
        events = [PrefixMiss(command.request) for batch in self.batches for command in batch if type(command) is Abort]
        self.batches = [[c for c in batch if type(c) is not Abort] for batch in self.batches]
        return Advance(events, None)

    def close(self):
        self.closes += 1
        self.misbehave("close")


class RecordingListener:
    """Records all callbacks; checks that they come on the loop and never from inside a call of the runtime."""

    def __init__(self):
        self.calls = []
        self.thread = threading.current_thread()
        self.inside = False
        self.fail_on = None

    def record(self, *what):
        assert threading.current_thread() is self.thread
        assert not self.inside
        self.calls.append(what)
        if self.fail_on and what[: len(self.fail_on)] == self.fail_on:
            raise RuntimeError("the listener is broken")

    def joined(self, worker, info):
        self.record("joined", worker, info)

    def events(self, worker, events):
        for event in events:
            self.record("event", worker, event.request)

    def died(self, worker, reason):
        self.record("died", worker, reason)

    def of(self, worker):
        return [what for what in self.calls if what[1] == worker]

    async def until(self, condition, seconds=60.0):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"only got {self.calls}"
            await asyncio.sleep(0.002)

    async def until_called(self, *what):
        await self.until(lambda: any(call[: len(what)] == what for call in self.calls))


class Guarded:
    """The runtime, marking the listener as `inside` during every call."""

    def __init__(self, runtime, listener):
        self.runtime, self.listener = runtime, listener

    def __getattr__(self, name):
        def call(*args):
            self.listener.inside = True
            try:
                return getattr(self.runtime, name)(*args)
            finally:
                self.listener.inside = False

        return call


@pytest.fixture(autouse=True)
def fresh():
    MADE.clear()
    GATE.clear()
    yield
    GATE.set()


def run(test, **options):
    """Run an async test with a runtime and its listener, and close the runtime."""

    async def main():
        runtime, listener = InlineRuntime(**options), RecordingListener()
        runtime.listen(listener)
        try:
            await test(Guarded(runtime, listener), listener)
        finally:
            await runtime.close()

    asyncio.run(main())


def spawn(runtime, worker, **settings):
    runtime.spawn(worker, Role.REWARD, f"{__name__}:Clerk", settings)


def test_a_worker_joins_answers_and_is_stopped():
    async def test(runtime, listener):
        spawn(runtime, "w", slots=3)
        runtime.post("w", [Abort(1)])  # before it has joined
        await listener.until_called("event", "w", 1)
        assert listener.calls == [("joined", "w", RewardInfo(3)), ("event", "w", 1)]
        runtime.stop("w")
        await listener.until(lambda: MADE[0].closes == 1)
        runtime.post("w", [Abort(2)])
        await asyncio.sleep(0.02)
        assert len(listener.calls) == 2

    run(test)


def test_commands_of_one_pass_travel_together():
    async def test(runtime, listener):
        spawn(runtime, "w")
        await listener.until_called("joined", "w")
        runtime.post("w", [EndSession(1)])
        runtime.post("w", [EndSession(2), EndSession(3)])
        runtime.post("w", [])
        await asyncio.sleep(0)
        runtime.post("w", [Abort(4)])
        await listener.until_called("event", "w", 4)
        sizes = [len(batch) for batch in MADE[0].batches]
        assert sizes[0] in (3, 4)  # the fourth may have caught up while the thread slept

    run(test)


@pytest.mark.parametrize("where", ["init", "info", "post", "advance"])
@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_worker_that_raises_is_dead_and_takes_no_other_with_it(where, how):
    async def test(runtime, listener):
        spawn(runtime, "good")
        spawn(runtime, "bad", **{where: how})
        runtime.post("bad", [Suspend(), Abort(1)])
        await listener.until_called("died", "bad")
        (died,) = [what for what in listener.calls if what[0] == "died"]
        assert died[2] == (f"ValueError: in {where}" if how == "raise" else "SystemExit: 1")
        before = ["joined"] if where in ("post", "advance") else []
        assert [what[0] for what in listener.of("bad")] == [*before, "died"]
        runtime.post("bad", [Abort(2)])
        runtime.post("good", [Abort(3)])
        runtime.stop("bad")
        await listener.until_called("event", "good", 3)
        assert listener.of("bad")[-1] == died
        built = next(made for made in MADE if where in made.settings)
        await listener.until(lambda: built.closes == (0 if where == "init" else 1))

    run(test)


def test_a_factory_that_is_not_there_is_a_death():
    async def test(runtime, listener):
        runtime.spawn("w", Role.ENGINE, "nowhere.at_all:Nothing", {})
        await listener.until_called("died", "w")
        assert "RequestError" in listener.calls[0][2]
        assert "nowhere.at_all:Nothing" in listener.calls[0][2]

    run(test)


def test_nothing_is_heard_after_stop():
    async def test(runtime, listener):
        spawn(runtime, "w", advance="raise")
        await listener.until_called("joined", "w")
        runtime.post("w", [Suspend(), Abort(1)])
        await asyncio.sleep(0)
        time.sleep(0.02)  # noqa: ASYNC251 - its death waits in the inbox while the loop is held up
        runtime.stop("w")
        spawn(runtime, "building", init="hang")
        await listener.until(lambda: len(MADE) == 2 and MADE[1].hanging.is_set())
        runtime.stop("building")
        GATE.set()
        await listener.until(lambda: all(made.closes == 1 for made in MADE))
        await asyncio.sleep(0.02)
        assert listener.calls == [("joined", "w", RewardInfo(1))]

    run(test)


def test_a_worker_is_driven_at_the_time_it_asked_for():
    async def test(runtime, listener):
        began = asyncio.get_running_loop().time()
        spawn(runtime, "w", beat=True)
        await listener.until(lambda: MADE and len(MADE[0].advances) >= 6)
        times = MADE[0].advances
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert min(gaps) >= 0.02 - 1e-6
        assert began <= times[0]
        assert times[-1] <= asyncio.get_running_loop().time()  # the loop's clock
        await asyncio.sleep(0.05)
        assert len(times) == 6  # then it sleeps

    run(test)


def test_a_worker_is_woken_from_another_thread():
    async def test(runtime, listener):
        spawn(runtime, "w", signal=True)
        await listener.until_called("event", "w", 77)

    run(test)


def test_events_keep_their_order_under_load():
    async def test(runtime, listener):
        names = ["a", "b", "c"]
        for name in names:
            spawn(runtime, name)
        for number in range(300):
            for name in names:
                runtime.post(name, [Abort(number)])
            if number % 7 == 0:
                await asyncio.sleep(0)
        for name in names:
            await listener.until(lambda name=name: len(listener.of(name)) == 301)
            assert [what[2] for what in listener.of(name)[1:]] == list(range(300))

    run(test)


def test_a_broken_listener_loses_nothing_but_its_own():
    async def test(runtime, listener):
        problems = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        listener.fail_on = ("joined", "a")
        for name in ("a", "b", "c"):
            spawn(runtime, name)
            runtime.post(name, [Abort(5)])
        for name in ("a", "b", "c"):
            await listener.until_called("event", name, 5)
        assert "broken" in str(problems[0]["exception"])

    run(test)


@pytest.mark.parametrize("where", ["init", "advance", "close"])
def test_a_thread_that_hangs_is_abandoned_and_named(where, caplog):
    async def main():
        runtime, listener = InlineRuntime(close_timeout_s=0.1), RecordingListener()
        runtime.listen(listener)
        spawn(runtime, "engine/stuck", **{where: "hang"})
        spawn(runtime, "engine/good")
        runtime.post("engine/stuck", [Suspend()])
        await listener.until(lambda: len(MADE) == 2)
        stuck, good = sorted(MADE, key=lambda made: not made.settings)
        if where != "close":
            await listener.until(stuck.hanging.is_set)
        runtime.stop("engine/good")
        await listener.until(lambda: not good.thread.is_alive())
        await runtime.close()
        assert stuck.thread.is_alive()
        await runtime.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "engine/stuck" in caplog.text
    assert "engine/good" not in caplog.text


def test_a_worker_that_fails_to_close_is_said_so(caplog):
    async def test(runtime, listener):
        spawn(runtime, "w", close="raise")
        await listener.until_called("joined", "w")

    run(test)
    assert "w failed to close: ValueError: in close" in caplog.text


def test_close_ends_every_thread():
    async def test(runtime, listener):
        for number in range(5):
            spawn(runtime, f"w{number}")
        runtime.stop("w0")
        await listener.until_called("joined", "w4")

    run(test)
    assert all(made.closes == 1 for made in MADE)
    assert not any(made.thread.is_alive() for made in MADE)


def test_misuse_is_refused():
    async def main():
        runtime = InlineRuntime()
        with pytest.raises(InvariantBroken, match="listen"):
            spawn(runtime, "w")
        runtime.listen(RecordingListener())
        with pytest.raises(InvariantBroken, match="once"):
            runtime.listen(RecordingListener())
        spawn(runtime, "w")
        runtime.stop("w")
        runtime.stop("w")
        runtime.stop("never there")
        runtime.post("never there", [Abort(1)])
        with pytest.raises(InvariantBroken, match="used before"):
            spawn(runtime, "w")
        await runtime.close()
        with pytest.raises(RequestError, match="closed"):
            spawn(runtime, "other")

    asyncio.run(main())


def test_threads_end_when_the_loop_is_gone():
    async def main():
        runtime, listener = InlineRuntime(), RecordingListener()
        runtime.listen(listener)
        spawn(runtime, "a", init="hang")
        spawn(runtime, "b", init="hang")
        await listener.until(lambda: len(MADE) == 2)

    asyncio.run(main())
    GATE.set()
    for made in MADE:
        made.thread.join(60)
        assert not made.thread.is_alive()
        assert made.closes == 1


def test_factory_paths():
    assert load(f"{__name__}:Clerk") is Clerk
    assert load("asyncio:Event.wait") is asyncio.Event.wait
    for path, problem in (
        ("asyncio", "package.module:callable"),
        (":x", "package.module:callable"),
        ("asyncio:", "package.module:callable"),
        ("no_such_module:x", "cannot import"),
        ("asyncio:no_such_thing", "spelling"),
        (f"{__name__}:MADE", "cannot be called"),
    ):
        with pytest.raises(RequestError, match=problem) as error:
            load(path)
        assert repr(path) in str(error.value)
