import statistics
import threading
import tomllib
from importlib import resources

import pytest
from parts import Driver

from rollart.backends.environments import inject
from rollart.backends.environments.codec import END_OF_TURN
from rollart.backends.environments.host import EnvironmentHost
from rollart.backends.environments.inject import Injected, drawn
from rollart.config.injection import PROFILES, Injection, Latency
from rollart.ports.environment import TextStep
from rollart.sim.draws import Distribution
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


# --- tails of the field ---------------------------------------------------------------------------------------------

EPISODES, TURNS = 4000, 4


def episodes(injection, hold=EnvironmentFault):
    """Play many; returns the number of episodes whose reset failed."""
    failed = 0
    for seed in range(EPISODES):
        environment = Injected(Calm(), Injection(**injection), reset(seed=seed))
        try:
            environment.reset(Prompt("p", "t", seed))
        except hold:
            failed += 1
            continue
        for _ in range(TURNS):
            environment.step("x")
    return failed


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def test_the_tails_of_the_paper(slept):
    """Reset: floor 14 s, median 20 s, almost all below 70 s, tail 500 s. Step: median 4 s, at most 30 s."""
    scale = 0.01
    failed = episodes({"tails": "swe", "scale": scale})
    resets, steps = [], []
    for seconds in slept:
        (resets if seconds / scale >= 13.99 else steps).append(seconds / scale)
    # A step of 14 s or more is one in a thousand, and counts as a reset here: far too few to matter.
    assert len(resets) == pytest.approx(EPISODES, rel=0.02)
    assert min(resets) == pytest.approx(14.0)
    assert quantile(resets, 0.5) == pytest.approx(20.0, rel=0.03)
    assert quantile(resets, 0.99) < 70.1
    assert max(resets) == pytest.approx(500.0)
    assert sum(each > 70.1 for each in resets) <= 0.003 * EPISODES
    assert quantile(steps, 0.5) == pytest.approx(4.0, rel=0.03)
    assert failed <= 0.002 * EPISODES


def test_one_batch_in_ten_meets_a_hang_or_a_failure():
    """The paper: failures hit about one iteration in ten. A batch has about a hundred of these episodes."""
    swe = Injection(tails="swe")
    trouble = swe.latency(0).tail_share + swe.failure(0)
    assert 1 - (1 - trouble) ** 104 == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("key", ["reset_s", "step_s"])
def test_names_and_values_agree_with_the_simulator(key):
    """The same table in `inject` and in [sim.tasks.NAME] is the same distribution."""
    scenario = resources.files("rollart.sim") / "scenarios" / "paper.toml"
    table = tomllib.loads(scenario.read_text(encoding="utf-8"))["sim"]["tasks"]["swe"]
    injected, simulated = Latency(**table[key]), Distribution(**table[key])
    assert getattr(PROFILES["swe"], key) == injected
    assert PROFILES["swe"].reset_failure == table["reset_failure"]
    for share in (1e-9, 0.0004, 0.0009, 0.01, 0.5, 0.9, 0.9999):
        assert drawn(injected, share) == pytest.approx(simulated.sample(share))


def test_given_values_replace_those_of_the_profile(slept):
    episode({"tails": "swe", "reset_s": 1.0, "scale": 0.5}, turns=1)
    assert slept[0] == pytest.approx(0.5)
    assert 0.5 < slept[1] < 15.0
    slept.clear()
    episode({"step_s": {"median": 3.0}}, turns=2)
    assert slept == pytest.approx([3.0, 3.0])
    slept.clear()
    episode({"reset_s": {"median": 2.0, "tail_share": 0.999, "tail": 9.0}}, turns=2)
    assert slept == pytest.approx([9.0])


def test_resets_and_steps_fail_with_their_probability(slept):
    assert 0.07 * EPISODES < episodes({"reset_failure": 0.1}) < 0.13 * EPISODES
    assert episodes({"tails": "swe", "reset_failure": 0.0}) == 0
    environment = Injected(Calm(), Injection(step_failure=1.0, bad_slots=(1,)), reset(slot=1))
    environment.reset(Prompt("p", "t", 1))
    with pytest.raises(EnvironmentFault, match="turn 1: its probability is 1"):
        environment.step("x")
    episode({"reset_failure": 1.0, "bad_slots": (1,)}, slot=0)
    with pytest.raises(EnvironmentFault, match="the reset"):
        episode({"reset_failure": 1.0, "reset_s": 2.0})
    assert slept[-1] == pytest.approx(2.0)  # a failure takes as long as a success


def test_one_factor_scales_all_times(slept, hung):
    episode({"latency_ms": 1000.0, "sigma": 0.0, "hang_share": 1.0, "hang_s": 50.0, "scale": 0.1}, turns=0)
    assert slept == pytest.approx([0.1])
    assert hung == pytest.approx([5.0])


def test_new_keys_leave_the_draws_of_older_ones_alone(slept):
    episode({"latency_ms": 50.0})
    older = slept.copy()
    slept.clear()
    episode({"latency_ms": 50.0, "reset_failure": 0.0, "step_s": 1.0})
    assert slept[0] == older[0]
    assert slept[1:] == pytest.approx([seconds + 1.0 for seconds in older[1:]])


@pytest.mark.parametrize(
    ("injection", "message"),
    [
        ({"tails": "sew"}, "swe"),
        ({"reset_s": {"median": 2, "min": 5, "max": 3}}, "max is below min"),
        ({"reset_s": {"median": 2, "tail": 5}}, "go together"),
        ({"reset_s": {"sigma": 2}}, "median"),
        ({"step_s": {"kind": "normal", "median": 2}}, "lognormal"),
        ({"scale": 0}, "scale"),
        ({"reset_failure": 1.5}, "reset_failure"),
    ],
)
def test_what_makes_no_sense_is_refused(injection, message):
    with pytest.raises(ValueError, match=message):
        Injection(**injection)
