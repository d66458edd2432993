"""Conformance of reward workers: they speak `Score`, and a reward is a finite number or a failure, never a guess."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rollart.ports.conformance.case import Case, ConformanceError, NotApplicable, Suite, check
from rollart.ports.conformance.drive import WorkerDrive
from rollart.ports.worker import Worker
from rollart.types.messages import RewardInfo, Score, Scored, ScoreFailed, WorkerEvent

SUITE = Suite["RewardHarness", None]()


@dataclass(kw_only=True)
class RewardHarness:
    """A reward worker and questions for it."""

    build: Callable[[Callable[[], None]], Worker]
    question: Callable[[int], Score]
    """The i-th question: each with a key of its own, and answered."""
    virtual: bool
    failing: Score | None = None
    """A question on which the function raises."""
    not_finite: tuple[Score, ...] = ()
    """Questions on which the function answers with something that is not a finite number: NaN, inf, a string."""
    calls: Callable[[], int] | None = None
    """How often the function was called so far."""


@SUITE.case
def says_what_it_can_do(harness: RewardHarness) -> None:
    """A reward worker joins with `RewardInfo` and at least one slot."""
    with drive(harness) as worker:
        check(isinstance(worker.info, RewardInfo), f"a reward worker joins with RewardInfo, not {worker.info}")
        check(isinstance(worker.info, RewardInfo) and worker.info.slots > 0, "a worker has at least one slot")


@SUITE.case
def every_key_is_answered(harness: RewardHarness) -> None:
    """Each question gets one answer with its key, also when many are asked at once."""
    with drive(harness) as worker:
        questions = [harness.question(index) for index in range(8)]
        worker.send(*questions)
        for question in questions:
            value(worker, question)
        worker.settle()
        for question in questions:
            check(len(answers(worker, question)) == 1, f"one answer per question, but got {answers(worker, question)}")


@SUITE.case
def values_are_finite_numbers(harness: RewardHarness) -> None:
    """A value is a finite float."""
    with drive(harness) as worker:
        for index in range(3):
            number = value(worker, harness.question(index))
            check(type(number) is float and math.isfinite(number), f"a reward is a finite float, but was {number!r}")


@SUITE.case
def a_doubled_question_counts_once(harness: RewardHarness) -> None:
    """The same key always means the same question: asked twice, at once or later, it is answered alike."""
    with drive(harness) as worker:
        question = harness.question(0)
        worker.send(question, question)
        value(worker, question)
        worker.settle()
        worker.send(question)
        worker.settle()
        given = answers(worker, question)
        check(all(answer == given[0] for answer in given), f"one key has one answer, but got {given}")
        if harness.calls is not None:
            check(
                harness.calls() <= 2, f"a question in work is not computed again, but {harness.calls()} calls were made"
            )


@SUITE.case
def the_answer_depends_on_the_question_only(harness: RewardHarness) -> None:
    """Stateless: another worker, asked in another order and under another key, gives the same values."""
    questions = [harness.question(index) for index in range(3)]
    with drive(harness) as worker:
        first = [value(worker, question) for question in questions]
    renamed = [msgspec.structs.replace(question, key=f"again/{question.key}") for question in reversed(questions)]
    with drive(harness) as worker:
        second = [value(worker, question) for question in renamed]
    check(first == second[::-1], f"the same questions have the same values, but got {first} and then {second[::-1]}")


@SUITE.case
def a_failure_is_said_so(harness: RewardHarness) -> None:
    """A function that raises is `ScoreFailed` with a reason, never a reward; the worker goes on."""
    if harness.failing is None:
        raise NotApplicable("the harness cannot make the function fail")
    with drive(harness) as worker:
        other = harness.question(0)
        worker.send(harness.failing, other)
        failed = refusal(worker, harness.failing)
        check(failed.reason, "a failure says what happened")
        value(worker, other, ask=False)


@SUITE.case
def not_finite_is_refused(harness: RewardHarness) -> None:
    """NaN, inf and strings are refused at the boundary: `ScoreFailed`, and asking again would not help."""
    if not harness.not_finite:
        raise NotApplicable("the function cannot answer with anything but a finite number")
    for question in harness.not_finite:
        with drive(harness) as worker:
            worker.send(question)
            failed = refusal(worker, question)
            check(not failed.retry, "asking again gives the same answer, so `retry` is False")
            value(worker, harness.question(0))


def drive(harness: RewardHarness) -> WorkerDrive:
    return WorkerDrive(harness.build, virtual=harness.virtual)


def answers(worker: WorkerDrive, question: Score) -> list[WorkerEvent]:
    return [event for event in worker.events if answers_to(event, question)]


def answers_to(event: WorkerEvent, question: Score) -> bool:
    return isinstance(event, Scored | ScoreFailed) and event.key == question.key


def value(worker: WorkerDrive, question: Score, *, ask: bool = True) -> float:
    """The value of a question that has one."""
    if ask and not answers(worker, question):
        worker.send(question)
    answer = worker.until(lambda event: answers_to(event, question))
    if not isinstance(answer, Scored):
        raise ConformanceError(f"a good question is answered by `Scored`, but got {answer}")
    return answer.value


def refusal(worker: WorkerDrive, question: Score) -> ScoreFailed:
    answer = worker.until(lambda event: answers_to(event, question))
    if not isinstance(answer, ScoreFailed):
        raise ConformanceError(f"a reward that could not be had is `ScoreFailed`, never a value, but got {answer}")
    worker.settle()
    check(len(answers(worker, question)) == 1, f"one answer per question, but got {answers(worker, question)}")
    return answer


CASES: tuple[Case[RewardHarness, None], ...] = SUITE.cases()
