"""Engine cases about one turn: how it ends, what it carries, and the effect of `Abort` and `Suspend`."""

import numpy as np

from rollart.conformance.case import ConformanceError, NotApplicable, Suite, check
from rollart.conformance.drive import Slice
from rollart.conformance.engine_desk import Desk, EngineHarness, Turn
from rollart.types.ids import RequestId
from rollart.types.messages import Abort, FinishReason, Progress, Refused, Resume, Suspend, TurnDone
from rollart.types.tokens import LOGPROB, TOKEN

SUITE = Suite[EngineHarness, None]()
PATIENT_INTERVAL_S = 1.0
"""In real time, longer progress intervals are not waited for."""


@SUITE.case
def refuses_before_any_version(harness: EngineHarness) -> None:
    """Without weights a request is `Refused`, and the engine stays usable."""
    with Desk(harness) as desk:
        answer = desk.answer(desk.ask(desk.session()))
        check(isinstance(answer, Refused), f"no weights yet is `Refused`, but the answer was {answer}")
        desk.serve()
        desk.turn(desk.session())


@SUITE.case
def a_turn_ends_exactly_once(harness: EngineHarness) -> None:
    """Every request is answered once, even if more are sent than the engine can run at once."""
    with Desk(harness) as desk:
        desk.serve()
        requests = [desk.ask(desk.session(), max_tokens=1 + index % 5) for index in range(2 * desk.info.slots + 1)]
        for request in requests:
            desk.answer(request)
        desk.drive.settle()
        for request in requests:
            endings = desk.endings(request)
            check(len(endings) == 1, f"a request ends once, but {request} was answered by {endings}")
            check(isinstance(endings[0], TurnDone), f"a request that fits is served, but {request} got {endings[0]}")


@SUITE.case
def max_tokens_is_respected(harness: EngineHarness) -> None:
    """A turn has at least one token and at most `max_tokens`; LENGTH means exactly `max_tokens`."""
    with Desk(harness) as desk:
        desk.serve()
        for max_tokens in (1, 2, 3, 7):
            check_length(desk.turn(desk.session(), max_tokens=max_tokens))


@SUITE.case
def a_stop_token_ends_the_turn(harness: EngineHarness) -> None:
    """A sampled stop token is the last token, and the turn ends with STOP."""
    if not harness.every_token:
        raise NotApplicable("simulated tokens have no ids")
    with Desk(harness) as desk:
        desk.serve()
        session = desk.session()
        turn = desk.finish(session, desk.ask(session, max_tokens=8, stop_tokens=harness.every_token))
        check(turn.finish is FinishReason.STOP, f"a stop token ends a turn with STOP, but it ended with {turn.finish}")
        check(turn.tokens == 1, f"the stop token is the last token, but {turn.tokens} were sampled")


@SUITE.case
def the_context_ends_the_turn(harness: EngineHarness) -> None:
    """A turn ends with LENGTH before prompt and answer exceed the engine's context."""
    with Desk(harness) as desk:
        desk.serve()
        room = 3
        turn = desk.turn(desk.session(), harness.tokens(desk.info.max_context - room), max_tokens=harness.long_turn)
        check(turn.tokens <= room, f"there was room for {room} tokens in the context, but {turn.tokens} were sampled")
        check(turn.finish is not FinishReason.ABORTED, "the turn was not aborted, but ended with ABORTED")


@SUITE.case
def a_prompt_that_is_too_long_is_refused(harness: EngineHarness) -> None:
    """A prompt that leaves no room for a token is `Refused`, and the engine continues."""
    with Desk(harness) as desk:
        desk.serve()
        other = desk.session()
        running = desk.ask(other, max_tokens=harness.long_turn)
        answer = desk.answer(desk.ask(desk.session(), harness.tokens(desk.info.max_context + 1)))
        check(
            isinstance(answer, Refused), f"a prompt longer than the context is `Refused`, but the answer was {answer}"
        )
        desk.finish(other, running)
        desk.turn(desk.session())


@SUITE.case
def runs_cover_the_tokens(harness: EngineHarness) -> None:
    """The runs of every report cover its tokens exactly, are not empty, and have non-decreasing versions."""
    with Desk(harness) as desk:
        desk.serve()
        desk.turn(desk.session(), max_tokens=harness.long_turn)
        reports = [event.generated for event in desk.drive.events if isinstance(event, TurnDone)]
        reports += [part for event in desk.drive.events if isinstance(event, Progress) for _, part in event.parts]
        for report in reports:
            covered = sum(run.length for run in report.runs)
            check(covered == report.tokens.length, f"runs cover {covered} tokens, but {report.tokens.length} came")
            check(all(run.length > 0 for run in report.runs), f"a run holds at least one token: {report.runs}")
            versions = [run.version for run in report.runs]
            check(versions == sorted(versions), f"versions never decrease, but were {versions}")


@SUITE.case
def one_logprob_per_token(harness: EngineHarness) -> None:
    """Every token id comes with one log-probability, finite and at most 0. Without ids there are none."""
    with Desk(harness) as desk:
        desk.serve()
        generated = desk.turn(desk.session(), max_tokens=harness.long_turn).generated
        if generated.tokens.payload is None:
            check(generated.logprobs is None, "a simulated segment has no log-probabilities")
            return
        ids = len(generated.tokens.payload) // TOKEN.itemsize
        check(
            ids == generated.tokens.length,
            f"the payload holds {ids} ids, but its length is {generated.tokens.length}",
        )
        check(generated.logprobs is not None, "sampled ids come with their log-probabilities")
        values = np.frombuffer(generated.logprobs or b"", dtype=LOGPROB)
        check(values.size == ids, f"one log-probability per token: {values.size} for {ids} tokens")
        check(bool(np.all(np.isfinite(values) & (values <= 0))), f"a log-probability is finite and at most 0: {values}")


@SUITE.case
def progress_and_end_add_up(harness: EngineHarness) -> None:
    """`TurnDone` carries the tokens after the last `Progress`: none is lost, reported twice, or reported late."""
    with Desk(harness) as desk:
        desk.serve()
        sessions = [desk.session() for _ in range(3)]
        requests = [desk.ask(session, max_tokens=harness.long_turn) for session in sessions]
        for session, request in zip(sessions, requests, strict=True):
            check_length(desk.finish(session, request))
        reported = [desk.reported(request).tokens.length for request in requests]
        desk.drive.settle()
        late = [desk.reported(request).tokens.length for request in requests]
        check(reported == late, "nothing is reported about a request after its end")
        if not desk.info.sessions:
            return
        for session in sessions:
            answer = desk.answer(desk.ask(session))
            check(
                isinstance(answer, TurnDone),
                "the reports of a turn add up to what the engine sampled, but the log they give is not the "
                f"prefix that the engine holds: {answer}",
            )


@SUITE.case
def progress_is_reported_in_time(harness: EngineHarness) -> None:
    """With requests in flight an engine reports at least every `progress_interval_s`."""
    with Desk(harness) as desk:
        interval_s = desk.info.progress_interval_s
        if not harness.virtual and interval_s > PATIENT_INTERVAL_S:
            raise NotApplicable(f"the interval of {interval_s:g} s is too long to wait for")
        slack_s = 1e-6 if harness.virtual else interval_s + 0.5
        desk.serve()
        start, silence_s = desk.drive.now(), 0.0
        while desk.drive.now() < start + 3 * interval_s:
            place = len(desk.drive.slices)
            desk.turn(desk.session(), max_tokens=harness.long_turn)
            silence_s = max(silence_s, longest_silence_s(desk.drive.slices[place:], virtual=harness.virtual))
        check(
            silence_s <= interval_s + slack_s,
            f"a busy engine reports every {interval_s:g} s, but there was no event for {silence_s:g} s",
        )


@SUITE.case
def a_duplicate_add_is_ignored(harness: EngineHarness) -> None:
    """A request that arrives twice, in flight or after its end, is served once."""
    with Desk(harness) as desk:
        desk.serve()
        session = desk.session()
        add = desk.prepare(session, max_tokens=5)
        desk.drive.send(add, add)
        check_length(desk.finish(session, add.request))
        desk.drive.send(add)
        desk.drive.settle()
        endings = desk.endings(add.request)
        check(len(endings) == 1, f"a duplicate `Add` is ignored, but the request was answered {len(endings)} times")


@SUITE.case
def abort_returns_what_was_generated(harness: EngineHarness) -> None:
    """`Abort` is answered once, by `TurnDone(ABORTED)` with the tokens so far; other requests continue."""
    with Desk(harness) as desk:
        desk.serve()
        for session, request, _ in desk.mid_turn():
            other = desk.session()
            neighbour = desk.ask(other, max_tokens=5)
            desk.drive.send(Abort(request), Abort(request))
            turn = desk.finish(session, request)
            check_length(desk.finish(other, neighbour))
            desk.drive.settle()
            check(len(desk.endings(request)) == 1, f"an abort is answered once: {desk.endings(request)}")
            if turn.finish is FinishReason.ABORTED and turn.tokens:
                check(
                    turn.tokens < harness.long_turn,
                    "an aborted request ends with what was generated so far, but all of its tokens came",
                )
                return
        raise ConformanceError("`Abort` ends a request with ABORTED, but every aborted turn ran to its own end")


@SUITE.case
def abort_of_a_queued_request(harness: EngineHarness) -> None:
    """A request waiting for a slot is aborted like any other, with nothing generated."""
    with Desk(harness) as desk:
        desk.serve()
        running = [desk.ask(desk.session(), max_tokens=harness.long_turn) for _ in range(desk.info.slots)]
        queued = desk.session()
        request = desk.ask(queued, max_tokens=harness.long_turn)
        desk.drive.send(Abort(request))
        turn = desk.finish(queued, request)
        check(turn.finish is FinishReason.ABORTED, f"`Abort` ends a request with ABORTED, not with {turn.finish}")
        for other in running:
            desk.answer(other)


@SUITE.case
def abort_of_an_unknown_request_is_ignored(harness: EngineHarness) -> None:
    """`Abort` of an unknown or ended request is ignored."""
    with Desk(harness) as desk:
        desk.serve()
        session = desk.session()
        ended = desk.ask(session)
        desk.finish(session, ended)
        place = desk.drive.mark()
        desk.drive.send(Abort(RequestId(10_000)), Abort(ended))
        desk.drive.settle()
        after = [event for event in desk.drive.events[place:] if isinstance(event, TurnDone)]
        check(not after, f"an `Abort` of an unknown request is ignored, but it gave {after}")
        desk.turn(desk.session())


@SUITE.case
def suspend_pauses_and_resume_continues(harness: EngineHarness) -> None:
    """Between `Suspend` and `Resume` no token is sampled; requests in flight are kept and new ones wait."""
    with Desk(harness) as desk:
        desk.serve()
        typical_s = desk.typical_turn_s()
        for session, request, _ in desk.mid_turn():
            desk.drive.send(Suspend())
            desk.drive.run_for(typical_s)  # a step in progress may end and be reported
            if desk.endings(request):
                desk.drive.send(Resume())
                continue
            place = desk.drive.mark()
            late = desk.session()
            waiting = desk.ask(late, max_tokens=2)
            desk.drive.run_for(3 * typical_s)
            for event in desk.drive.events[place:]:
                check(not isinstance(event, TurnDone), f"no step is taken while suspended, but a turn ended: {event}")
                if isinstance(event, Progress):
                    sampled = [part for part in event.parts if part[1].tokens.length]
                    check(not sampled, f"no step is taken while suspended, but tokens were sampled: {sampled}")
            desk.drive.send(Resume())
            check_length(desk.finish(session, request))
            check_length(desk.finish(late, waiting))
            return
        raise ConformanceError("`Suspend` pauses an engine, but every turn in flight ran to its end")


@SUITE.case
def abort_is_answered_while_suspended(harness: EngineHarness) -> None:
    """Aborting takes no step: a suspended engine answers it at once, and later continues without the request."""
    with Desk(harness) as desk:
        desk.serve()
        session = desk.session()
        request = desk.ask(session, max_tokens=harness.long_turn)
        desk.drive.send(Suspend())
        desk.drive.send(Abort(request))
        turn = desk.finish(session, request)
        check(turn.finish is FinishReason.ABORTED, f"`Abort` ends a request with ABORTED, not with {turn.finish}")
        desk.drive.send(Resume())
        desk.turn(desk.session())


@SUITE.case
def duplicate_suspend_and_resume(harness: EngineHarness) -> None:
    """`Suspend` and `Resume` may arrive twice, and unpaired; one `Resume` is enough."""
    with Desk(harness) as desk:
        desk.serve()
        desk.drive.send(Resume(), Suspend(), Suspend(), Resume(), Resume())
        check_length(desk.turn(desk.session()))


def longest_silence_s(slices: list[Slice], *, virtual: bool) -> float:
    """The longest time without an event, as far as the engine could help it.

    In real time only slices count that gave nothing: a machine that is busy with something else may call an engine as
    late as it likes, and one that reports as soon as it is called has kept its promise.
    """
    heard_at, longest_s = slices[0].at, 0.0
    for at, events in slices:
        if virtual or not events:
            longest_s = max(longest_s, at - heard_at)
        if events:
            heard_at = at
    return longest_s


def check_length(turn: Turn) -> None:
    """The number of tokens of a turn is consistent with its finish reason."""
    check(turn.finish is not FinishReason.ABORTED, "the turn was not aborted, but ended with ABORTED")
    check(
        1 <= turn.tokens <= turn.max_tokens,
        f"a turn has 1 to `max_tokens` = {turn.max_tokens} tokens, but this one has {turn.tokens}",
    )
    if turn.finish is FinishReason.LENGTH:
        check(
            turn.tokens == turn.max_tokens,
            f"`max_tokens` = {turn.max_tokens} ended the turn, but its reports add up to {turn.tokens} tokens",
        )
