"""Simulated environments: the same episode wherever and whenever it runs."""

import statistics
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from sim_parts import TASK, Driver, profile, prompt

from rollart.sim.environment import SimEnvironments
from rollart.sim.workload import TaskProfile, Workload
from rollart.types.ids import TrajectoryId
from rollart.types.messages import Close, EnvironmentEvent, EnvironmentFailed, Observed, Reset, Step
from rollart.types.tokens import Segment

ACTION = Segment(30, None)


def hosting(chosen: TaskProfile | None = None, slots: int = 8, **extra: Any) -> Driver:
    settings = {"task": TASK, "profile": chosen or profile(), "slots": slots, "seed": 3} | extra
    return Driver(SimEnvironments(settings, lambda: None))


def reset(episode: int, *, slot: int = 0, seed: int = 100, member: int = 0) -> Reset:
    return Reset(TrajectoryId(episode), slot, prompt(seed), member)


def step(episode: int, turn: int) -> Step:
    return Step(TrajectoryId(episode), turn, ACTION)


def play(driver: Driver, command: Reset) -> list[tuple[float, EnvironmentEvent]]:
    """One episode to its end: how long each answer took, and the answer."""
    answers: list[tuple[float, EnvironmentEvent]] = []
    asked: Reset | Step = command
    while True:
        start, place = driver.now, len(driver.log)
        driver.send(asked)
        driver.run()
        ((at, event),) = driver.log[place:]
        assert isinstance(event, Observed | EnvironmentFailed)
        answers.append((round(at - start, 9), event))
        if isinstance(event, EnvironmentFailed) or event.done:
            return answers
        asked = step(command.episode, event.turn + 1)


def without_ids(answers: list[tuple[float, EnvironmentEvent]]) -> list[object]:
    return [
        (wait, event.turn, event.observation.length, event.reward, event.done)
        if isinstance(event, Observed)
        else (wait, event.turn, event.reason)
        for wait, event in answers
    ]


@given(st.integers(0, 2**63 - 1), st.integers(0, 15))
@settings(max_examples=50, deadline=None)
def test_an_episode_depends_on_prompt_and_member_only(seed: int, member: int) -> None:
    alone = play(hosting(), reset(1, seed=seed, member=member))
    driver = hosting(slots=3)
    play(driver, reset(7, slot=2, seed=seed + 1, member=member))
    later = play(driver, reset(99, slot=1, seed=seed, member=member))
    assert without_ids(alone) == without_ids(later)
    turns = [event.turn for _, event in alone]
    assert turns == list(range(len(turns)))
    assert 2 <= turns[-1] <= 6
    last = alone[-1][1]
    assert isinstance(last, Observed)
    assert last.done
    assert not last.truncated
    assert last.reward in (0.0, 1.0)
    assert all(isinstance(event, Observed) and event.reward == 0.0 for _, event in alone[:-1])


def test_members_share_the_prompt_and_nothing_else() -> None:
    driver = hosting(profile(prompt_tokens={"kind": "uniform", "low": 1, "high": 10_000}))
    played = [play(driver, reset(member, member=member)) for member in range(6)]
    assert len({event.observation.length for (_, event), *_ in played if isinstance(event, Observed)}) == 1
    assert len({len(answers) for answers in played}) > 1


def test_tasks_with_one_seed_are_unlike() -> None:
    lengths = [
        [Workload(task, profile(), 5).answer_tokens(seed) for seed in range(50)] for task in ("one", "other", "one")
    ]
    assert lengths[0] == lengths[2] != lengths[1]


def test_failures_come_at_their_rate_after_their_latency() -> None:
    driver = hosting(profile(reset_failure=0.3, step_failure=0.1, step_s=1.0))
    played = [play(driver, reset(index, seed=index)) for index in range(600)]
    reset_failed = [answers[0][1] for answers in played if isinstance(answers[0][1], EnvironmentFailed)]
    assert 0.25 < len(reset_failed) / 600 < 0.35
    steps = [answer for answers in played for answer in answers[1:]]
    failed = [wait for wait, event in steps if isinstance(event, EnvironmentFailed)]
    assert 0.07 < len(failed) / len(steps) < 0.13
    assert set(failed) == {1.0}


def test_another_member_has_other_luck() -> None:
    flaky = hosting(profile(reset_failure=0.5))
    answers = [play(flaky, reset(member, seed=7, member=member))[0][1] for member in range(100)]
    assert 0.3 < statistics.fmean(isinstance(answer, EnvironmentFailed) for answer in answers) < 0.7


def test_doubled_commands_are_answered_alike() -> None:
    driver = hosting()
    driver.send(reset(1), reset(1))
    driver.run()
    assert len(driver.log) == 1
    assert driver.send(reset(1)) == [driver.log[0][1]]
    driver.send(step(1, 1))
    assert driver.send(step(1, 1)) == []
    driver.run()
    answer = driver.log[-1][1]
    assert driver.send(step(1, 1), step(1, 1)) == [answer, answer]
    assert driver.send(reset(1)) == [], "an older turn needs no answer"


def test_a_slot_holds_one_episode_and_close_frees_it() -> None:
    driver = hosting()
    driver.send(reset(1), reset(2))
    driver.run()
    assert [event.episode for event in driver.events(Observed)] == [2]
    driver.send(step(2, 1), Close(TrajectoryId(2)), Close(TrajectoryId(2)))
    assert driver.wake_at is None, "there is no wake-up for a closed episode"
    (gone,) = driver.send(step(2, 2))
    assert isinstance(gone, EnvironmentFailed)


def test_what_does_not_follow_fails_and_raises_nothing() -> None:
    driver = hosting()
    (no_slot,) = driver.send(reset(1, slot=8))
    assert isinstance(no_slot, EnvironmentFailed)
    driver.send(reset(2))
    (early,) = driver.send(step(2, 1))
    assert isinstance(early, EnvironmentFailed)
    driver.run()
    (gap,) = driver.send(step(2, 3))
    assert isinstance(gap, EnvironmentFailed)
    played = play(driver, reset(3, slot=1))
    (over,) = driver.send(step(3, played[-1][1].turn + 1))
    assert isinstance(over, EnvironmentFailed)
