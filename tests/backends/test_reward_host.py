import asyncio
import json
import math
import threading

import msgspec
import numpy as np
import pytest
from parts import PATIENCE_S, RewardDriver

from rollart.backends.rewards.functions import episode_return
from rollart.backends.rewards.host import RewardHost
from rollart.ports.reward_call import MAX_ERROR_CHARACTERS
from rollart.types.messages import EpisodeRecord, RewardInfo, Scored, ScoreFailed, ScoreRequest
from rollart.types.transcript import Transcript, TranscriptTurn, pack

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
    "large": 10**400,
    "list": [1.0],
}


def judge(t):
    """Answers as the artifact requests."""
    CALLS.append(t.trajectory)
    word = t.artifact.decode()
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


def transcript(number, artifact=b"good", rewards=()):
    turns = tuple(TranscriptTurn(f"see {index}", f"do {index}", reward) for index, reward in enumerate(rewards))
    return Transcript(task="t", trajectory=number, prompt_id="p", seed=0, member=number, turns=turns, artifact=artifact)


def score(key, artifact=b"good", rewards=()):
    packed = pack(transcript(key, artifact, rewards))
    return ScoreRequest(str(key), "t", "judge", (EpisodeRecord(key, 0, rewards, transcript=packed),))


def of_group(key, *rewards):
    packed = [pack(transcript(number, rewards=(reward,))) for number, reward in enumerate(rewards)]
    return ScoreRequest(key, "t", "rank", tuple(EpisodeRecord(n, 0, transcript=each) for n, each in enumerate(packed)))


def host(function=f"{__name__}:judge", **settings):
    return RewardDriver(RewardHost, {"function": function, **settings})


def test_the_return_is_the_sum_of_the_rewards():
    assert episode_return(transcript(1, rewards=(1.0, 0.5))) == 1.5
    assert episode_return(transcript(1)) == 0.0
    driver = host("rollart.backends.rewards.functions:episode_return", slots=2)
    assert driver.worker.info() == RewardInfo(2)
    driver.send(score(1, rewards=(0.25, 0.5)))
    assert driver.answers() == [Scored("1", (0.75,))]


def test_the_return_needs_no_transcript():
    driver = host("rollart.backends.rewards.functions:episode_return")
    driver.send(ScoreRequest("1", "t", "episode_return", (EpisodeRecord(1, 0, (0.25, 0.5)),)))
    assert driver.answers() == [Scored("1", (0.75,))]


def test_a_transcript_that_cannot_be_read_is_no_reward():
    driver = host()
    for key, packed in (("1", b""), ("2", b"\x01junk"), ("3", pack(transcript(1))[:-3])):
        driver.send(ScoreRequest(key, "t", "judge", (EpisodeRecord(1, 0, transcript=packed),)))
        (failed,) = driver.answers()
        assert isinstance(failed, ScoreFailed)
        assert not failed.retry
        assert "transcript" in failed.reason
    assert not CALLS


def ranks(group: list[Transcript]) -> list[float]:
    best = max(t.earned for t in group)
    return [t.earned - best for t in group]


async def slow_parts(t: Transcript) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"earned": t.earned, "turns": len(t.turns)}


def one_short(group: list[Transcript]) -> list[float]:
    return [1.0] * (len(group) - 1)


def nan_member(group: list[Transcript]) -> list[float]:
    return [math.nan, *[1.0] * (len(group) - 1)]


def no_parts(t: Transcript) -> dict[str, float]:  # noqa: ARG001
    return {}


def nan_part(t: Transcript) -> dict[str, float]:  # noqa: ARG001
    return {"style": math.nan}


def test_a_group_is_one_call():
    driver = host(f"{__name__}:ranks")
    driver.send(of_group("1", 1.0, 3.0, 2.0))
    assert driver.answers() == [Scored("1", (-2.0, 0.0, -1.0))]


def test_named_parts_of_an_async_function():
    driver = host(f"{__name__}:slow_parts")
    driver.send(score(1, rewards=(0.5, 0.25)), score(2))
    answers = {answer.key: answer for answer in driver.answers(2)}
    assert answers == {
        "1": Scored("1", (2.75,), ({"earned": 0.75, "turns": 2.0},)),
        "2": Scored("2", (0.0,), ({"earned": 0.0, "turns": 0.0},)),
    }


@pytest.mark.parametrize(
    ("function", "why"),
    [("one_short", "1 numbers for 2"), ("nan_member", "nan"), ("no_parts", "at least one"), ("nan_part", "nan")],
)
def test_an_answer_of_the_wrong_shape_is_no_reward(function, why):
    driver = host(f"{__name__}:{function}")
    driver.send(of_group("1", 1.0, 2.0))
    (failed,) = driver.answers()
    assert isinstance(failed, ScoreFailed)
    assert not failed.retry
    assert why in failed.reason


def test_a_key_is_scored_once():
    driver = host()
    driver.send(score(1), score(1))
    assert driver.answers() == [Scored("1", (4.0,))]
    driver.send(score(1))
    assert driver.answers() == [Scored("1", (4.0,))]
    assert CALLS == [1]


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


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError


def quotes_the_agent(t: Transcript) -> float:
    said = json.loads(t.artifact)
    raise Unspeakable if said == "unspeakable" else ValueError(said)


def part_of_the_agent(t: Transcript) -> dict[str, float]:
    return {json.loads(t.artifact): 1.0}


@pytest.mark.parametrize(
    ("function", "said", "why"),
    [
        ("quotes_the_agent", b'"\\ud83d"', "ValueError: \\ud83d"),
        ("quotes_the_agent", b'"unspeakable"', "Unspeakable: (its text cannot be made)"),
        ("part_of_the_agent", b'"\\ud83d"', "names are Unicode text"),
    ],
)
def test_text_of_the_agent_does_not_break_an_answer(function, said, why):
    driver = host(f"{__name__}:{function}")
    driver.send(score(1, said))
    (failed,) = driver.answers()
    assert why in msgspec.msgpack.decode(msgspec.msgpack.encode(failed), type=ScoreFailed).reason


def test_long_texts_of_errors_are_cut():
    driver = host(f"{__name__}:quotes_the_agent")
    driver.send(score(1, json.dumps("x" * 10_000).encode()))
    (failed,) = driver.answers()
    assert len(failed.reason) == len("ValueError: ") + MAX_ERROR_CHARACTERS


def test_a_function_that_hangs_holds_up_its_thread_only():
    driver = host(slots=2)
    driver.send(score(1, b"hang"), *[score(n) for n in range(2, 6)])
    assert {answer.key for answer in driver.answers(4)} == {"2", "3", "4", "5"}
    GATE.set()
    assert driver.answers() == [Scored("1", (4.0,))]
    driver.worker.close()
