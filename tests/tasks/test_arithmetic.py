import re

import pytest

from rollart.ports.environment import TextStep
from rollart.tasks.arithmetic import HINT, RULES, Arithmetic, value
from rollart.types.errors import EnvironmentFault, RequestError
from rollart.types.trajectory import Prompt


def asked(problem):
    environment = Arithmetic()
    first = environment.reset(Prompt("p", "math", 0, {"problem": problem}))
    assert first.observation == f"{RULES}\n{problem}"
    return environment


def test_an_episode():
    environment = asked("12*7+5")
    assert environment.step("C 12*7") == TextStep("84+5")
    assert environment.step("I say C 84 + 5").observation == "89"
    last = environment.step("A 89")
    assert (last.reward, last.done, last.truncated) == (1.0, True, False)


@pytest.mark.parametrize(("answer", "reward"), [("A 88", 0.0), ("A89", 1.0), ("A -89", 0.0), ("so A 089", 1.0)])
def test_an_answer_ends_it(answer, reward):
    last = asked("12*7+5").step(answer)
    assert (last.reward, last.done) == (reward, True)


@pytest.mark.parametrize("nonsense", ["", "C", "A", "89", "C 12/7", "C 1+", "A one", "c 1+1", "C 9**9"])
def test_nonsense_is_a_lost_turn(nonsense):
    step = asked("12*7+5").step(nonsense)
    assert (step.observation, step.reward, step.done) == (HINT, 0.0, False)


@pytest.mark.parametrize(
    ("problem", "action", "observation"),
    [
        ("12*7+5", "C 2*7", "14"),
        ("12*7+5", "C 7+5", "12"),
        ("12*75+5", "C 12*7", "84"),
        ("5+12*7", "C 5+12", "17"),
        ("2*3*4", "C 2*3", "6*4"),
        ("50-20+7-3", "C 50-20", "30+7-3"),
    ],
)
def test_what_is_left_is_told_if_the_problem_begins_with_it(problem, action, observation):
    assert asked(problem).step(action).observation == observation


def test_the_calculator_does_one_operation_of_numbers_that_fit():
    environment = asked("1+1")
    assert environment.step("C 5-12").observation == "-7"
    assert environment.step("C -7*3").observation == "-21"
    assert environment.step("C 1+2+3").observation == "3"
    assert len(environment.step(f"C {'9' * 12}*{'9' * 12}").observation) == 24
    assert environment.step(f"C {'9' * 40}*{'9' * 40}").observation == HINT


@pytest.mark.parametrize(("problem", "result"), [("10-3-2", 5), ("2+3*4-5*2", 4), ("7", 7), ("0*5+1", 1)])
def test_products_come_first(problem, result):
    assert value(problem) == result


def test_drawn_problems_can_be_done_from_the_left():
    texts = {Arithmetic().reset(Prompt("p", "math", seed)).observation.splitlines()[-1] for seed in range(200)}
    assert len(texts) > 150
    for text in texts:
        assert re.fullmatch(r"\d\d[+*]\d\d[-+]\d\d", text)
        assert 100 <= value(text) == eval(text) <= 999
        assert 100 <= eval(text[:5]) <= 999
    assert re.fullmatch(r"\d\d([-+*]\d\d){3}", Arithmetic(3).reset(Prompt("p", "math", 1)).observation.splitlines()[-1])


@pytest.mark.parametrize("problem", ["1/2", "__import__", "12*", 7])
def test_a_problem_that_is_none_is_refused(problem):
    with pytest.raises(RequestError, match="12\\*7"):
        asked(problem)


def test_it_can_be_closed_at_any_time():
    environment = Arithmetic()
    environment.close()
    with pytest.raises(EnvironmentFault, match="reset"):
        environment.step("A 1")
