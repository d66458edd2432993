import statistics
import threading

import pytest
from parts import Driver

from rollart.backends.environments import inject
from rollart.backends.environments.codec import END_OF_TURN
from rollart.backends.environments.host import EnvironmentHost
from rollart.backends.environments.inject import Injected
from rollart.config.injection import Injection
from rollart.ports.environment import TextStep
from rollart.types.errors import EnvironmentFault
from rollart.types.messages import EnvironmentFailed, Observed, Reset, Step
from rollart.types.tokens import Segment
from rollart.types.trajectory import Prompt


class Calm:
    def reset(self, prompt):
        return TextStep(str(prompt.seed))

    def step(self, action):
        return TextStep(action)

    def close(self):
        pass


def reset(slot=0, seed=1, member=0, episode=1):
    return Reset(episode, slot, Prompt("p", "t", seed), member)


@pytest.fixture
def slept(monkeypatch):
    """Instead of sleeping."""
    times = []
    monkeypatch.setattr(inject.time, "sleep", times.append)
    return times


@pytest.fixture
def hung(monkeypatch):
    """Instead of hanging."""
    times = []

    class Recorded(threading.Event):
        def wait(self, timeout=None):
            times.append(timeout)

    monkeypatch.setattr(inject.threading, "Event", Recorded)
    return times


def episode(injection, turns=4, **where):
    environment = Injected(Calm(), Injection(**injection), reset(**where))
    environment.reset(Prompt("p", "t", where.get("seed", 1)))
    for turn in range(turns):
        environment.step(str(turn))


def test_latency_is_log_normal_with_the_mean_that_is_asked_for(slept):
    for seed in range(400):
        episode({"latency_ms": 50.0, "sigma": 1.0}, seed=seed)
    assert len(slept) == 400 * 5
    assert 0.045 < statistics.fmean(slept) < 0.055
    assert 0.026 < statistics.median(slept) < 0.034  # mean / exp(1/2)


def test_the_same_episode_meets_the_same_trouble(slept):
    episode({"latency_ms": 50.0}, seed=1, member=0)
    first = slept.copy()
    slept.clear()
    episode({"latency_ms": 50.0}, seed=1, member=0)
    assert slept == first
    assert len(set(first)) == 5
    slept.clear()
    episode({"latency_ms": 50.0}, seed=1, member=1)
    assert not set(slept) & set(first)


def test_hangs_come_at_their_share_and_in_bad_slots_only(hung):
    for seed in range(400):
        episode({"hang_share": 0.1, "hang_s": 5.0, "bad_slots": (1,)}, slot=seed % 2, seed=seed)
    assert 70 < len(hung) < 130  # of 200 · 5
    assert set(hung) == {5.0}
    hung.clear()
    episode({"hang_share": 1.0}, turns=0)
    assert hung == [None]


def test_every_so_many_turns_it_raises():
    environment = Injected(Calm(), Injection(raise_every=3, bad_slots=(2,)), reset(slot=2))
    environment.reset(Prompt("p", "t", 1))
    assert [environment.step(word).observation for word in "ab"] == ["a", "b"]
    with pytest.raises(EnvironmentFault, match="turn 3"):
        environment.step("c")
    episode({"raise_every": 1, "bad_slots": (2,)}, slot=0)


def test_every_injection_of_a_list_has_chances_of_its_own(hung):
    def turns(number):
        hung.clear()
        environment = Injected(Calm(), Injection(hang_share=0.5), reset(), number)
        return [environment.step("a") and len(hung) for _ in range(40)]

    assert turns(0) == turns(0) != turns(1)


def test_every_injection_of_a_list_has_slots_of_its_own():
    settings = {"task": "t", "environment": f"{__name__}:Calm", "slots": 3}
    bad = [{"bad_slots": [0], "raise_every": 1}, {"bad_slots": [1], "raise_every": 2}]
    driver = Driver(EnvironmentHost, settings | {"inject": bad})
    failed_in = {}
    for slot in range(3):
        driver.send(reset(slot, episode=slot))
        driver.answers()
        for turn in (1, 2):
            driver.send(Step(slot, turn, Segment.of([65, END_OF_TURN])))
            (answer,) = driver.answers()
            if isinstance(answer, EnvironmentFailed):
                failed_in.setdefault(slot, turn)
    driver.worker.close()
    assert failed_in == {0: 1, 1: 2}


def test_it_is_an_option_of_the_host():
    settings = {"task": "t", "environment": f"{__name__}:Calm", "slots": 2}
    driver = Driver(EnvironmentHost, settings | {"inject": {"raise_every": 1, "bad_slots": [1], "latency_ms": 1.0}})
    for slot, kind in ((0, Observed), (1, EnvironmentFailed)):
        driver.send(reset(slot, episode=slot + 1))
        driver.answers()
        driver.send(Step(slot + 1, 1, Segment.of([65, END_OF_TURN])))
        (answer,) = driver.answers()
        assert isinstance(answer, kind)
    driver.worker.close()
    with pytest.raises(ValueError, match="latency"):
        Driver(EnvironmentHost, settings | {"inject": {"latency": 3}})
