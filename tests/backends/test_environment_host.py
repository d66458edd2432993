import math
import threading

import numpy as np
import pytest
from parts import PATIENCE_S, Driver, end_threads

from rollart.backends.environments.codec import END_OF_TURN, EPISODE_START, ByteCodec
from rollart.backends.environments.host import EnvironmentHost
from rollart.ports.environment import TextStep
from rollart.types.errors import RequestError
from rollart.types.messages import Close, EnvironmentFailed, EnvironmentInfo, Observed, Reset, Step
from rollart.types.tokens import Segment
from rollart.types.trajectory import Prompt, state_key

BUILT = []
HOSTS = []
GATES: dict[str, threading.Event] = {}


class Parrot:
    """Repeats its actions. Some words make it misbehave."""

    def __init__(self, greeting="hi"):
        self.greeting = greeting
        self.actions = []
        self.closed = threading.Event()
        BUILT.append(self)

    def reset(self, prompt):
        if prompt.data.get("reset") == "raise":
            raise OSError("no cage")
        self.on_close = prompt.data.get("close")
        return TextStep(f"{self.greeting} {prompt.seed}")

    def step(self, action):
        self.actions.append(action)
        match action.split():
            case ["raise"]:
                raise ValueError("squawk")
            case ["exit"]:
                raise SystemExit(3)
            case ["hang", gate]:
                GATES[gate].wait(PATIENCE_S)
                return TextStep("late")
            case ["done"]:
                return TextStep("bye", 1.0, True, artifact=b"feather")
            case ["perch", name]:
                return TextStep(f"squawk {len(self.actions)}", state=name)
            case ["fresh"]:
                return TextStep("again", fresh_context=True)
            case ["answer", what]:
                return ANSWERS[what]
        return TextStep(action, np.float32(0.5))

    def close(self):
        if self.on_close == "hang":
            GATES["close"].wait(PATIENCE_S)
        self.closed.set()
        if self.on_close == "raise":
            raise ValueError("does not leave")


ANSWERS = {
    "none": None,
    "bytes": TextStep(b"bytes"),
    "nan": TextStep("x", math.nan),
    "inf": TextStep("x", math.inf),
    "text": TextStep("x", "1.0"),
    "bool": TextStep("x", True),
    "artifact": TextStep("x", artifact="text"),
    "state": TextStep("x", state=7),
}


@pytest.fixture(autouse=True)
def gates():
    """Opened at the end, so that no thread outlives its test."""
    BUILT.clear()
    GATES.clear()
    GATES.update(a=threading.Event(), b=threading.Event(), close=threading.Event())
    yield
    for gate in GATES.values():
        gate.set()
    while HOSTS:
        HOSTS.pop().worker.close()
    end_threads("parrot")


def host(**settings):
    driver = Driver(EnvironmentHost, {"task": "parrot", "environment": f"{__name__}:Parrot", "slots": 2, **settings})
    HOSTS.append(driver)
    driver.codec = ByteCodec()
    return driver


def reset(episode, slot=0, seed=1, **data):
    return Reset(episode, slot, Prompt("p", "parrot", seed, data), 0)


def step(episode, turn, text):
    return Step(episode, turn, Segment.of([*text.encode(), END_OF_TURN]))


def one(driver, command):
    driver.send(command)
    (answer,) = driver.answers()
    return answer


def started(driver, episode=1, slot=0, **data):
    assert isinstance(one(driver, reset(episode, slot, **data)), Observed)


def test_an_episode_in_tokens():
    driver = host(environment_settings={"greeting": "hello"})
    assert driver.worker.info() == EnvironmentInfo("parrot", 2)
    first = one(driver, reset(1, seed=7))
    assert first == Observed(1, 0, Segment.of(driver.codec.render("hello 7", first=True)), state=state_key(b"hello 7"))
    second = one(driver, step(1, 1, "ahoi ä"))
    assert second == Observed(
        1, 1, Segment.of(driver.codec.render("ahoi ä", first=False)), 0.5, state=state_key("ahoi ä".encode())
    )
    third = one(driver, step(1, 2, "done"))
    assert (third.reward, third.done, third.truncated, third.transcript) == (1.0, True, False, b"")
    driver.send(Close(1))
    driver.slice()
    assert BUILT[0].closed.wait(PATIENCE_S)
    assert BUILT[0].actions == ["ahoi ä", "done"]


def test_an_environment_may_name_its_state():
    """Whatever it shows then: the key is that of the name. Without one, the observation is the state."""
    driver = host()
    driver.call(reset(1))
    left, right, again = (
        driver.call(step(1, turn, f"perch {name}"))[0] for turn, name in ((1, "left"), (2, "right"), (3, "left"))
    )
    assert left.observation != again.observation
    assert left.state == again.state == state_key(b"left") != right.state
    (unnamed,) = driver.call(step(1, 4, "hello"))
    (cut,) = driver.call(Step(1, 5, Segment.of(list(b"hello"))))
    assert unnamed.observation != cut.observation, "a turn that was cut off is ended in the context"
    assert unnamed.state == cut.state


def test_a_fresh_context_opens_a_sequence():
    driver = host()
    started(driver)
    answer = one(driver, step(1, 1, "fresh"))
    assert answer.new_sequence
    assert answer.observation.ids()[0] == EPISODE_START


def test_doubles_are_answered_from_memory():
    driver = host()
    first = one(driver, reset(1))
    assert one(driver, reset(1)) == first
    driver.send(step(1, 1, "a"), step(1, 1, "a"))
    (second,) = driver.answers()
    assert one(driver, step(1, 1, "other")) == second
    assert one(driver, reset(1)) == first
    driver.send(Close(1), Close(1), Close(99))
    assert one(driver, step(1, 1, "a")) == second
    assert one(driver, reset(1)) == first
    assert len(BUILT) == 1
    assert BUILT[0].actions == ["a"]


@pytest.mark.parametrize(("word", "reason"), [("raise", "ValueError: squawk"), ("exit", "SystemExit: 3")])
def test_an_environment_that_raises_fails_alone(word, reason):
    driver = host()
    started(driver, 1, 0)
    started(driver, 2, 1)
    assert one(driver, step(1, 1, word)) == EnvironmentFailed(1, 1, reason)
    assert BUILT[0].closed.wait(PATIENCE_S)
    assert isinstance(one(driver, step(2, 1, "a")), Observed)
    assert isinstance(one(driver, step(1, 2, "a")), EnvironmentFailed)
    assert isinstance(one(driver, reset(3, 0)), Observed)


def test_an_environment_that_cannot_start_fails():
    driver = host()
    assert one(driver, reset(1, 0, reset="raise")) == EnvironmentFailed(1, 0, "OSError: no cage")
    answer = one(host(environment_settings={"colour": 3}), reset(1))
    assert "TypeError" in answer.reason
    assert answer.permanent, "no other try would go better"


@pytest.mark.parametrize("what", sorted(ANSWERS))
def test_junk_is_a_failure_of_the_environment(what):
    driver = host()
    started(driver)
    answer = one(driver, step(1, 1, f"answer {what}"))
    assert isinstance(answer, EnvironmentFailed)
    assert "must be" in answer.reason
    assert answer.permanent


def test_a_hanging_environment_blocks_nobody():
    driver = host()
    started(driver, 1, 0)
    started(driver, 2, 1)
    driver.send(step(1, 1, "hang a"))
    assert isinstance(one(driver, step(2, 1, "a")), Observed)
    # A reset into its slot abandons it; its later answer is void.
    assert isinstance(one(driver, reset(3, 0)), Observed)
    GATES["a"].set()
    assert BUILT[0].closed.wait(PATIENCE_S)
    assert one(driver, step(3, 1, "b")).episode == 3
    assert driver.rest() == []


def test_a_hanging_environment_that_is_closed_frees_its_slot():
    driver = host()
    started(driver)
    driver.send(step(1, 1, "hang a"))
    driver.slice()
    driver.send(Close(1))
    assert isinstance(one(driver, reset(2, 0)), Observed)


def test_an_environment_that_hangs_in_close_frees_its_slot():
    driver = host()
    started(driver, close="hang")
    driver.send(Close(1))
    assert isinstance(one(driver, reset(2, 0)), Observed)
    assert isinstance(one(driver, step(2, 1, "a")), Observed)


def test_an_environment_that_fails_to_close_is_over_all_the_same():
    driver = host()
    started(driver, close="raise")
    assert isinstance(one(driver, reset(2, 0)), Observed)


def test_turns_out_of_order_are_refused():
    driver = host()
    assert isinstance(one(driver, step(1, 1, "a")), EnvironmentFailed)
    started(driver)
    assert "cannot follow" in one(driver, step(1, 2, "a")).reason
    assert isinstance(one(driver, step(1, 1, "done")), Observed)
    assert "cannot follow" in one(driver, step(1, 2, "a")).reason
    assert "slot 7" in one(driver, reset(5, 7)).reason


def test_an_episode_goes_on_until_its_environment_or_the_controller_ends_it():
    """Limits on turns and tokens are the controller's."""
    driver = host()
    started(driver)
    for turn in range(1, 41):
        observed = one(driver, step(1, turn, "a long answer"))
        assert (observed.done, observed.truncated) == (False, False)
    last = one(driver, step(1, 41, "done"))
    assert (last.done, last.truncated) == (True, False)


def test_episodes_long_over_are_forgotten():
    driver = host()
    for episode in range(1, 301):
        driver.send(reset(episode), Close(episode))
        driver.slice()
    assert len(driver.worker._episodes) <= 257


def test_close_ends_the_threads():
    driver = host()
    started(driver, 1, 0)
    started(driver, 2, 1)
    driver.send(step(2, 1, "hang b"))
    driver.slice()
    threads = dict(driver.worker._threads)
    driver.worker.close()
    threads[0].thread.join(PATIENCE_S)
    assert not threads[0].thread.is_alive()
    assert threads[1].thread.is_alive()
    assert BUILT[0].closed.is_set()


def test_settings_are_checked():
    with pytest.raises(RequestError, match="nowhere"):
        host(environment="nowhere:Nothing")
    with pytest.raises(ValueError, match="max_turn"):
        host(max_turn=3)


def test_bytes_there_and_back():
    codec = ByteCodec()
    tokens = codec.render("Grüße", first=True)
    assert codec.text(tokens) == "Grüße"
    assert max(tokens) < codec.vocabulary <= 264
    assert codec.text([0xC3, END_OF_TURN]) == "\N{REPLACEMENT CHARACTER}"


def test_a_turn_that_was_cut_off_is_ended_in_the_context():
    driver = host()
    started(driver)
    cut = Step(1, 1, Segment.of([65, 66]))
    expected = [END_OF_TURN, *driver.codec.render("AB", first=False)]
    assert one(driver, cut).observation == Segment.of(expected)
    silent = Step(1, 2, Segment.of([]))
    assert one(driver, silent).observation == Segment.of([END_OF_TURN, *driver.codec.render("", first=False)])
    cut_and_fresh = Step(1, 3, Segment.of(list(b"fresh")))
    assert one(driver, cut_and_fresh).observation == Segment.of(driver.codec.render("again", first=True))
