"""The suites notice: every double breaks one promise, and the case about that promise fails on it, for that reason.

A breakage may reach other cases too (lost tokens break prefixes), but never all of them.
"""

import inspect
from collections.abc import Callable, Coroutine
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from doubles import engines, hosts, prompt_sources, runtimes, sinks, stores, trainers
from doubles.bent import bend
from harnesses.common import TASK, corrupt_memory
from harnesses.engines import reference_engine, simulated_engine
from harnesses.environments import hosted_environments, simulated_environments
from harnesses.prompt_sources import seed_prompts
from harnesses.rewards import hosted_reward
from harnesses.runtimes import virtual_runtime
from harnesses.trainers import reference_trainer, simulated_trainer

from rollart.conformance import engine, environment, prompts, reward, runtime, sink, trainer, weights
from rollart.conformance.case import Case, ConformanceError, NotApplicable
from rollart.conformance.prompts import PromptSourceHarness
from rollart.conformance.runtime import RuntimeHarness
from rollart.conformance.sink import EventSinkHarness
from rollart.conformance.weights import WeightStoreHarness
from rollart.sim.loop import run_virtual


class Broken(NamedTuple):
    """A double, the case that is about what it breaks, and a part of that case's message."""

    double: type
    cases: tuple[Case[Any, Any], ...]
    harness: Callable[[type, Path], Any]
    expected: str
    message: str


def worker(make: Callable[[], Any]) -> Callable[[type, Path], Any]:
    """A harness of a worker, with the double around everything it builds."""
    return scratched(lambda _scratch: make())


def scratched(make: Callable[[Path], Any]) -> Callable[[type, Path], Any]:
    """The same, of a harness that writes to the disk."""

    def bent(double: type, scratch: Path) -> Any:
        harness = make(scratch)
        hooks = ("build", "failing_reset", "failing_step", "transcribing", "of_group", "in_parts")
        built = {hook: getattr(harness, hook) for hook in hooks if getattr(harness, hook, None) is not None}
        return with_changes(harness, **{hook: bend(build, double) for hook, build in built.items()})

    return bent


def store(double: type, _scratch: Path) -> WeightStoreHarness:
    made = double()
    return WeightStoreHarness(store=made, corrupt=lambda version, index: corrupt_memory(made, version, index))


def source(double: type, _scratch: Path) -> PromptSourceHarness:
    return with_changes(seed_prompts(), build=lambda: double(TASK, 10, 7, shuffle_seed=1))


def hosting(double: type, scratch: Path) -> RuntimeHarness:
    return with_changes(virtual_runtime(scratch), build=double)


def writing(double: type, _scratch: Path) -> EventSinkHarness:
    made = double()
    return EventSinkHarness(
        build=lambda: made,
        read_back=lambda: list(made.durable),
        run=run_virtual,
        break_it=lambda: setattr(made, "broken", True),
    )


simulated = worker(lambda: simulated_engine("recompute"))
ENGINE = engine.CASES
PAYLOAD = tuple(case for case in ENGINE if case.name in ("one_logprob_per_token", "max_tokens_is_respected"))
"""What only a real engine can get wrong; the rest of the suite is run through simulated doubles, which are quick."""
BROKEN = [
    Broken(engines.LosesAToken, ENGINE, simulated, "progress_and_end_add_up", "its reports add up to"),
    Broken(engines.DropsProgress, ENGINE, simulated, "progress_and_end_add_up", "its reports add up to"),
    Broken(
        engines.StampsTheOldVersion,
        ENGINE,
        simulated,
        "tokens_carry_the_version_in_service",
        "every token carries the version in service",
    ),
    Broken(
        engines.ServesTheUnstaged,
        ENGINE,
        simulated,
        "an_unstaged_version_is_not_served",
        "only a staged, newer version is served",
    ),
    Broken(
        engines.BelievesTheStore,
        ENGINE,
        simulated,
        "a_corrupt_version_is_not_staged",
        "a version that cannot be verified is `StageFailed`",
    ),
    Broken(engines.RecomputesNothing, ENGINE, simulated, "a_turn_in_flight_spans_an_update", "but recomputed nothing"),
    Broken(engines.AnswersTwice, ENGINE, simulated, "a_turn_ends_exactly_once", "a request ends once"),
    Broken(
        engines.IgnoresAbort,
        ENGINE,
        simulated,
        "abort_returns_what_was_generated",
        "every aborted turn ran to its own end",
    ),
    Broken(
        engines.IgnoresSuspend,
        ENGINE,
        simulated,
        "suspend_pauses_and_resume_continues",
        "no step is taken while suspended",
    ),
    Broken(
        engines.ForgetsSessions,
        ENGINE,
        simulated,
        "a_later_turn_hits_the_prefix",
        "the engine holds everything the turn needs",
    ),
    Broken(engines.IgnoresTheWhole, ENGINE, simulated, "an_unknown_session_misses", "did not come within"),
    Broken(
        engines.LosesALogprob,
        PAYLOAD,
        worker(reference_engine),
        "one_logprob_per_token",
        "one log-probability per token",
    ),
    Broken(
        hosts.RestartsBlank,
        environment.CASES,
        worker(simulated_environments),
        "an_unknown_episode_fails",
        "a failure is never an observation",
    ),
    Broken(
        hosts.SwallowsUnknown,
        environment.CASES,
        worker(simulated_environments),
        "an_unknown_episode_fails",
        "did not come within",
    ),
    Broken(
        hosts.FailsWithReward,
        environment.CASES,
        worker(simulated_environments),
        "a_failing_step_is_reported",
        "a failure is never an observation",
    ),
    Broken(
        hosts.ActsTwice,
        environment.CASES,
        worker(hosted_environments),
        "a_duplicate_command_is_executed_once",
        "a turn has one answer",
    ),
    Broken(hosts.ZeroForFailure, reward.CASES, worker(hosted_reward), "a_failure_is_reported", "never a value"),
    Broken(hosts.PassesNan, reward.CASES, worker(hosted_reward), "not_finite_is_refused", "never a value"),
    Broken(
        hosts.LosesMembers,
        reward.CASES,
        worker(hosted_reward),
        "a_group_gets_a_value_per_member",
        "three episodes have three values",
    ),
    Broken(
        hosts.SortsMembers,
        reward.CASES,
        worker(hosted_reward),
        "a_group_gets_a_value_per_member",
        "values follow the order",
    ),
    Broken(hosts.HalfOfTheParts, reward.CASES, worker(hosted_reward), "parts_add_up", "do not add up"),
    Broken(
        hosts.TranscribesEarly,
        environment.CASES,
        worker(hosted_environments),
        "an_ended_episode_has_its_transcript",
        "no transcript is made if none is wanted",
    ),
    Broken(
        hosts.CountsAgain,
        reward.CASES,
        worker(hosted_reward),
        "a_duplicate_question_counts_once",
        "one key has one answer",
    ),
    Broken(
        trainers.TrainsTwice,
        trainer.CASES,
        scratched(reference_trainer),
        "a_duplicate_train_is_trained_once",
        "not those of one step",
    ),
    Broken(
        trainers.HidesItsFailures,
        trainer.CASES,
        scratched(reference_trainer),
        "an_old_version_is_not_published",
        "is older than",
    ),
    Broken(
        trainers.ForgetsItsParent,
        trainer.CASES,
        scratched(reference_trainer),
        "a_trained_version_is_published",
        "the manifest in the store is the published one",
    ),
    Broken(
        trainers.SavesNothing,
        trainer.CASES,
        scratched(simulated_trainer),
        "a_saved_version_is_restored",
        "the next trainer restored None",
    ),
    Broken(
        trainers.KeepsItsFirst,
        trainer.CASES,
        scratched(simulated_trainer),
        "the_newest_save_is_restored",
        "the next trainer restored v0.1",
    ),
    Broken(
        trainers.LosesItsMoments,
        trainer.CASES,
        scratched(reference_trainer),
        "training_resumes_exactly",
        "the weights differ",
    ),
    Broken(
        stores.ReadsUnverified, weights.CASES, store, "a_flipped_byte_is_never_read", "a damaged bucket is not read"
    ),
    Broken(
        stores.PublishesUnverified,
        weights.CASES,
        store,
        "a_wrong_bucket_publishes_nothing",
        "a wrong digest is refused",
    ),
    Broken(stores.GoesBack, weights.CASES, store, "versions_only_grow", "is not newer than"),
    Broken(stores.EvictsTheOldest, weights.CASES, store, "an_adapter_is_held_with_what_it_is_on", "can be read"),
    Broken(stores.DropsWhatIsNeeded, weights.CASES, store, "what_is_needed_is_not_dropped", "is needed by"),
    Broken(stores.KeepsTheBuffers, weights.CASES, store, "published_bytes_are_the_stores_own", "can be read"),
    Broken(
        prompt_sources.SkipsOne,
        prompts.CASES,
        source,
        "a_cursor_resumes_without_skip_or_repeat",
        "continues with the next",
    ),
    Broken(prompt_sources.LiveCursor, prompts.CASES, source, "a_cursor_is_a_value", "a cursor is a value"),
    Broken(prompt_sources.TakesAnyCursor, prompts.CASES, source, "a_foreign_cursor_is_refused", "was accepted"),
    Broken(runtimes.KeepsDeathsQuiet, runtime.CASES, hosting, "a_raising_worker_dies_alone", "`died` follows"),
    Broken(runtimes.TurnsEventsAround, runtime.CASES, hosting, "order_is_kept", "keep their order"),
    Broken(runtimes.NeverStops, runtime.CASES, hosting, "a_stopped_worker_is_silent", "`stop` ends all callbacks"),
    Broken(runtimes.IgnoresInterpreter, runtime.CASES, hosting, "a_worker_may_have_its_own_interpreter", "is refused"),
    Broken(
        runtimes.AnswersInside, runtime.CASES, hosting, "the_listener_is_called_on_the_loop", "never called from inside"
    ),
    Broken(sinks.FlushesLater, sink.CASES, writing, "flush_covers_what_came_before", "durable after `flush`"),
    Broken(sinks.ForgetsTheRest, sink.CASES, writing, "close_flushes", "durable after `flush`"),
    Broken(sinks.DropsWhenFull, sink.CASES, writing, "append_never_blocks", "each event once"),
    Broken(sinks.HidesFullDisk, sink.CASES, writing, "failures_are_raised_by_flush", "but it returned"),
]


def failures(broken: Broken, scratch: Path) -> dict[str, str]:
    """The cases that fail, with their messages; any other error is a bug of the suite."""
    failed = {}
    for index, case in enumerate(broken.cases):
        folder = scratch / str(index)
        folder.mkdir()
        harness = broken.harness(broken.double, folder)
        try:
            result: Coroutine[Any, Any, None] | None = case.run(harness)
            if inspect.iscoroutine(result):
                harness.run(result)
        except ConformanceError as error:
            failed[case.name] = str(error)
        except NotApplicable:
            continue
    return failed


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.double.__name__)
def test_the_suite_notices(broken: Broken, tmp_path: Path) -> None:
    failed = failures(broken, tmp_path)
    assert broken.message in failed.get(broken.expected, "it passed")
    assert len(failed) < len(broken.cases), "a suite that fails as a whole does not show what is broken"


def test_answers_may_be_told_one_by_one(tmp_path: Path) -> None:
    """The reward suite asks each question once, however long its answer is on its way."""
    unbroken = Broken(hosts.OneByOne, reward.CASES, worker(hosted_reward), "", "")
    assert failures(unbroken, tmp_path) == {}


def test_the_unbroken_sink_conforms(tmp_path: Path) -> None:
    """The one fake that exists for its doubles only is right itself."""
    unbroken = Broken(sinks.ListSink, sink.CASES, writing, "", "")
    assert failures(unbroken, tmp_path) == {}
