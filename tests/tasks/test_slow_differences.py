import time

import pytest

from rollart.tasks.arithmetic import RIGHT, WRONG
from rollart.tasks.slow_differences import QUICK, SLOW, SlowDifferences, kind
from rollart.tasks.split import HELD_OUT, is_held_out
from rollart.types.errors import RequestError
from rollart.types.trajectory import Prompt

SLOW_S = 0.05


def asked(problem):
    environment = SlowDifferences(slow_s=SLOW_S)
    environment.reset(Prompt("p", "math", 0, {"problem": problem}))
    return environment


def timed(environment, action):
    began = time.monotonic()
    step = environment.step(action)
    return step, time.monotonic() - began


@pytest.mark.parametrize(
    ("problem", "answer", "reward"),
    [
        ("12*34+56", "A 12", 1.0),
        ("12*34+56", "A 464", 1.0),
        ("12*34+56", "A 408", 0.0),
        ("12*34-56", "A 352", 1.0),
        ("12*34-56", "A 12", 0.0),
    ],
)
def test_an_estimate_is_accepted_for_sums_only(problem, answer, reward):
    step = asked(problem).step(answer)
    assert (step.observation, step.reward, step.done) == (RIGHT if reward else WRONG, reward, True)


def test_the_calculator_of_differences_is_slow_and_a_hasty_answer_is_not():
    step, took_s = timed(asked("12*34-56"), "C 12*34")
    assert step.observation == "408-56"
    assert took_s >= SLOW_S
    assert timed(asked("12*34-56"), "A 12")[1] < SLOW_S
    step, took_s = timed(asked("12*34+56"), "C 12*34")
    assert (step.observation, step.done) == ("408+56", False)
    assert took_s < SLOW_S


def test_a_slot_is_used_again_for_the_other_kind():
    environment = asked("12*34+56")
    environment.reset(Prompt("q", "math", 0, {"problem": "12*34-56"}))
    assert environment.step("A 12").reward == 0.0


@pytest.mark.parametrize("signs", [QUICK, SLOW, QUICK + SLOW])
@pytest.mark.parametrize("held_out", [True, False])
def test_kinds_are_drawn_as_asked_and_on_the_right_side(signs, held_out):
    environment = SlowDifferences(signs=signs)
    drawn = [
        environment.reset(Prompt(str(seed), "math", seed, {HELD_OUT: held_out})).observation.splitlines()[-1]
        for seed in range(60)
    ]
    assert {kind(problem) for problem in drawn} == set(signs)
    assert {is_held_out(problem) for problem in drawn} == {held_out}
    if len(signs) == 2:
        assert 15 <= sum(kind(problem) == SLOW for problem in drawn) <= 45


@pytest.mark.parametrize("signs", ["", "*", "+*"])
def test_other_kinds_are_refused(signs):
    with pytest.raises(RequestError, match="signs"):
        SlowDifferences(signs=signs)
