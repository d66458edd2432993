"""Conformance of reward workers: a reward is a finite number per episode or a failure, never a guess."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rollart.conformance.case import Case, ConformanceError, NotApplicable, Suite, check
from rollart.conformance.drive import WorkerDrive
from rollart.ports.worker import Worker
from rollart.types.messages import FunctionsUsed, RewardInfo, Scored, ScoreFailed, ScoreRequest, WorkerEvent
from rollart.types.reward_use import RewardUse, add_uses

SUITE = Suite["RewardHarness", None]()


@dataclass(kw_only=True)
class RewardHarness:
    """A reward worker and questions for it."""

    build: Callable[[Callable[[], None]], Worker]
    question: Callable[[int], ScoreRequest]
    """The i-th question; each has its own key, and a value."""
    virtual: bool
    failing: ScoreRequest | None = None
    """A question on which the function raises."""
    not_finite: tuple[ScoreRequest, ...] = ()
    """Questions on which the function returns something other than a finite number: NaN, inf, a string."""
    calls: Callable[[], int] | None = None
    """Number of calls of the function so far."""
    of_group: Callable[[Callable[[], None]], Worker] | None = None
    """A worker whose function sees a whole group."""
    group: Callable[[int], ScoreRequest] | None = None
    """A question about that many members, whose values all differ."""
    in_parts: Callable[[Callable[[], None]], Worker] | None = None
    """A worker whose function gives named parts."""
    hanging: Callable[[int], ScoreRequest] | None = None
    """The i-th question on which the function never returns, with a deadline; of workers that enforce it."""
    counts_use: bool = False
    """Whether the worker reports what its answers took."""


@SUITE.case
def declares_its_slots(harness: RewardHarness) -> None:
    """A reward worker joins with `RewardInfo` and at least one slot."""
    with drive(harness) as worker:
        check(isinstance(worker.info, RewardInfo), f"a reward worker joins with RewardInfo, not {worker.info}")
        check(isinstance(worker.info, RewardInfo) and worker.info.slots > 0, "a worker has at least one slot")


@SUITE.case
def every_key_is_answered(harness: RewardHarness) -> None:
    """Each question gets one answer with its key, even if many are asked at once."""
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
            number = ask(worker, harness.question(index))
            check(type(number) is float and math.isfinite(number), f"a reward is a finite float, but was {number!r}")


@SUITE.case
def a_duplicate_question_counts_once(harness: RewardHarness) -> None:
    """A repeated key, at once or later, gets the same answer."""
    with drive(harness) as worker:
        question = harness.question(0)
        worker.send(question, question)
        value(worker, question)
        worker.settle()
        worker.send(question)
        worker.settle()
        given = answers(worker, question)
        check(all(each == given[0] for each in given), f"one key has one answer, but got {given}")
        if harness.calls is not None:
            check(
                harness.calls() <= 2, f"a pending question is not computed again, but {harness.calls()} calls were made"
            )


@SUITE.case
def the_answer_depends_on_the_question_only(harness: RewardHarness) -> None:
    """Stateless: another worker, with another order and other keys, gives the same values."""
    questions = [harness.question(index) for index in range(3)]
    with drive(harness) as worker:
        first = [ask(worker, question) for question in questions]
    renamed = [msgspec.structs.replace(question, key=f"again/{question.key}") for question in reversed(questions)]
    with drive(harness) as worker:
        second = [ask(worker, question) for question in renamed]
    check(first == second[::-1], f"the same questions have the same values, but got {first} and then {second[::-1]}")


@SUITE.case
def a_failure_is_reported(harness: RewardHarness) -> None:
    """A function that raises is `ScoreFailed` with a reason, never a reward; the worker continues."""
    if harness.failing is None:
        raise NotApplicable("the harness cannot make the function fail")
    with drive(harness) as worker:
        other = harness.question(0)
        worker.send(harness.failing, other)
        failed = refusal(worker, harness.failing)
        check(failed.reason, "a failure has a reason")
        value(worker, other)


@SUITE.case
def not_finite_is_refused(harness: RewardHarness) -> None:
    """NaN, inf and strings are refused at the boundary: `ScoreFailed`, without `retry`."""
    if not harness.not_finite:
        raise NotApplicable("the function can only return finite numbers")
    for question in harness.not_finite:
        with drive(harness) as worker:
            worker.send(question)
            failed = refusal(worker, question)
            check(not failed.retry, "retrying gives the same answer, so `retry` is False")
            ask(worker, harness.question(0))


@SUITE.case
def a_group_gets_a_value_per_member(harness: RewardHarness) -> None:
    """A question about several episodes is answered by as many values, in their order, however they are ordered."""
    if harness.of_group is None or harness.group is None:
        raise NotApplicable("the harness has no function that sees a group")
    question = harness.group(3)
    turned = msgspec.structs.replace(question, key=f"{question.key}/turned", episodes=question.episodes[::-1])
    with drive(harness, harness.of_group) as worker:
        worker.send(question)
        values = answer(worker, question).values
        check(len(values) == 3, f"three episodes have three values, but got {values}")
        check(all(type(number) is float and math.isfinite(number) for number in values), f"{values} are not numbers")
        worker.send(turned)
        again = answer(worker, turned).values
        check(again == values[::-1], f"values follow the order of the episodes, but got {values} and then {again}")


@SUITE.case
def parts_add_up(harness: RewardHarness) -> None:
    """Named parts come for every episode, are finite, and add up to its value."""
    if harness.in_parts is None:
        raise NotApplicable("the harness has no function that gives named parts")
    with drive(harness, harness.in_parts) as worker:
        question = harness.question(0)
        worker.send(question)
        given = answer(worker, question)
        check(len(given.parts) == len(given.values) == 1, f"one episode has one value and its parts, but got {given}")
        parts, total = given.parts[0], given.values[0]
        check(parts and all(isinstance(name, str) for name in parts), f"parts have names, but were {parts}")
        check(math.isclose(math.fsum(parts.values()), total), f"the parts {parts} do not add up to {total}")


@SUITE.case
def the_deadline_of_a_question_is_enforced(harness: RewardHarness) -> None:
    """Functions that never return are given up at their deadlines, with `retry`, and every slot is usable again."""
    if harness.hanging is None:
        raise NotApplicable("the worker cannot stop a function")
    with drive(harness) as worker:
        slots = worker.info.slots if isinstance(worker.info, RewardInfo) else 1
        hanging = [harness.hanging(index) for index in range(slots)]
        worker.send(*hanging)
        for question in hanging:
            check(refusal(worker, question).retry, "another attempt may not hang, so `retry` is True")
        questions = [harness.question(index) for index in range(2 * slots)]
        worker.send(*questions)
        for question in questions:
            value(worker, question)


@SUITE.case
def use_comes_with_the_answers(harness: RewardHarness) -> None:
    """What calls took is reported by reward, no later than their answers, and each is counted once."""
    if not harness.counts_use:
        raise NotApplicable("the worker does not count")
    with drive(harness) as worker:
        questions = [harness.question(index) for index in range(4)]
        worker.send(*questions)
        for question in questions:
            value(worker, question)
        worker.send(questions[0])  # a duplicate is answered again, and not a call
        worker.settle()
        total: dict[str, RewardUse] = {}
        answered = 0
        for event in worker.events:
            if isinstance(event, FunctionsUsed):
                add_uses(total, event.uses)
            answered += isinstance(event, Scored)
            check(sum(use.calls for use in total.values()) >= min(answered, 4), "an answer came before its use")
        check(list(total) == [questions[0].route], f"use is counted by reward, but was {list(total)}")
        use = total[questions[0].route]
        check(use.calls == 4 and use.failed == 0, f"four calls were answered, but {use} was counted")
        check(sum(use.latencies.values()) == 4, f"every call has a latency, but {use.latencies} were counted")
        check(use.replica_s > 0.0, "calls occupy replicas")


def drive(harness: RewardHarness, build: Callable[[Callable[[], None]], Worker] | None = None) -> WorkerDrive:
    return WorkerDrive(build or harness.build, virtual=harness.virtual)


def answers(worker: WorkerDrive, question: ScoreRequest) -> list[WorkerEvent]:
    return [event for event in worker.events if answers_to(event, question)]


def answers_to(event: WorkerEvent, question: ScoreRequest) -> bool:
    return isinstance(event, Scored | ScoreFailed) and event.key == question.key


def ask(worker: WorkerDrive, question: ScoreRequest) -> float:
    """Send a valid question and wait for its value."""
    worker.send(question)
    return value(worker, question)


def value(worker: WorkerDrive, question: ScoreRequest) -> float:
    """Wait for the value of a question about one episode that was sent."""
    values = answer(worker, question).values
    check(len(values) == 1, f"one episode has one value, but got {values}")
    return values[0]


def answer(worker: WorkerDrive, question: ScoreRequest) -> Scored:
    """Wait for the answer to a question that was sent. It is never sent again: a second request is a second answer."""
    given = worker.until(lambda event: answers_to(event, question))
    if not isinstance(given, Scored):
        raise ConformanceError(f"a valid question is answered by `Scored`, but got {given}")
    return given


def refusal(worker: WorkerDrive, question: ScoreRequest) -> ScoreFailed:
    given = worker.until(lambda event: answers_to(event, question))
    if not isinstance(given, ScoreFailed):
        raise ConformanceError(f"a failed reward is `ScoreFailed`, never a value, but got {given}")
    worker.settle()
    check(len(answers(worker, question)) == 1, f"one answer per question, but got {answers(worker, question)}")
    return given


CASES: tuple[Case[RewardHarness, None], ...] = SUITE.cases()
