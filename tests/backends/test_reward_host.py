import math
import threading

import numpy as np
import pytest
from parts import PATIENCE_S, Driver

from rollart.backends.rewards.functions import episode_return
from rollart.backends.rewards.host import RewardHost
from rollart.types.messages import RewardInfo, Scored, ScoreFailed, ScoreRequest
from rollart.types.trajectory import Prompt

CALLS = []
GATE = threading.Event()
VALUES = {
    "nan": math.nan,
    "inf": -math.inf,
    "text": "1",
    "bool": True,
    "none": None,
    "numpy bool": np.bool_(True),
    "complex": 1j,
    "list": [1.0],
}


def judge(question):
    """Answers as the artifact requests."""
    CALLS.append(question.key)
    word = question.artifact.decode()
    if word == "raise":
        raise OSError("429")
    if word == "typo":
        raise NameError("lenght")
    if word == "hang":
        GATE.wait(PATIENCE_S)
    return VALUES[word] if word in VALUES else np.float32(len(word))


@pytest.fixture(autouse=True)
def fresh():
    CALLS.clear()
    GATE.clear()
    yield
    GATE.set()


def score(key, artifact=b"good", rewards=()):
    return ScoreRequest(str(key), 1, "t", Prompt("p", "t", 0), rewards, artifact, False)


def host(function=f"{__name__}:judge", **settings):
    return Driver(RewardHost, {"function": function, **settings})


def test_the_return_is_the_sum_of_the_rewards():
    assert episode_return(score(1, rewards=(1, 0.5))) == 1.5
    assert episode_return(score(1)) == 0.0
    driver = host("rollart.backends.rewards.functions:episode_return", slots=2)
    assert driver.worker.info() == RewardInfo(2)
    driver.send(score(1, rewards=(0.25, 0.5)))
    assert driver.answers() == [Scored("1", 0.75)]


def test_a_key_is_scored_once():
    driver = host()
    driver.send(score(1), score(1))
    assert driver.answers() == [Scored("1", 4.0)]
    driver.send(score(1))
    assert driver.answers() == [Scored("1", 4.0)]
    assert CALLS == ["1"]


@pytest.mark.parametrize("what", sorted(VALUES))
def test_what_is_no_finite_number_is_no_reward(what):
    driver = host()
    driver.send(score(1, what.encode()))
    (failed,) = driver.answers()
    assert isinstance(failed, ScoreFailed)
    assert not failed.retry
    driver.send(score(1, what.encode()))
    assert driver.answers() == [failed]
    assert len(CALLS) == 1


def test_a_function_that_raises_may_be_asked_again():
    driver = host()
    for _ in range(2):
        driver.send(score(1, b"raise"))
        assert driver.answers() == [ScoreFailed("1", "OSError: 429", retry=True)]
    assert len(CALLS) == 2


def test_a_function_whose_code_is_wrong_is_not_asked_again():
    driver = host()
    driver.send(score(1, b"typo"))
    assert driver.answers() == [ScoreFailed("1", "NameError: lenght", retry=False)]


def test_a_function_that_hangs_holds_up_its_thread_only():
    driver = host(slots=2)
    driver.send(score(1, b"hang"), *[score(n) for n in range(2, 6)])
    assert {answer.key for answer in driver.answers(4)} == {"2", "3", "4", "5"}
    GATE.set()
    assert driver.answers() == [Scored("1", 4.0)]
    driver.worker.close()
