"""Engine cases about sessions: only new tokens are sent, and a missing prefix is requested."""

import msgspec
import numpy as np

from rollart.conformance.case import NotApplicable, Suite, check
from rollart.conformance.engine_desk import PROMPT_TOKENS, Desk, EngineHarness, Session, ends
from rollart.types.messages import EndSession, PrefixMiss, TurnUsage
from rollart.types.tokens import LOGPROB, Generated, Segment, VersionRun
from rollart.types.versions import Version

SUITE = Suite[EngineHarness, None]()


@SUITE.case
def the_first_turn_is_prefilled(harness: EngineHarness) -> None:
    """A first turn has no prefix: its whole prompt is accounted for, and none of it is recomputed."""
    with Desk(harness) as desk:
        desk.serve()
        usage = desk.turn(desk.session()).usage
        check_prompt(usage, PROMPT_TOKENS)
        check(usage.recomputed == 0, f"no KV was invalidated, but {usage.recomputed} tokens were recomputed")


@SUITE.case
def a_later_turn_hits_the_prefix(harness: EngineHarness) -> None:
    """A session's next turn prefills only its new part; the prefix is cached."""
    with Desk(harness) as desk:
        needs_sessions(desk)
        desk.serve()
        session = desk.session()
        desk.turn(session, harness.tokens(PROMPT_TOKENS + 2 * harness.cache_block))
        for _ in range(3):
            prefix, new = session.log.length, harness.tokens(5)
            usage = desk.turn(session, new).usage
            check_prompt(usage, prefix + new.length)
            check(usage.cached > 0, "the prefix of a session is kept between turns, but nothing was cached")
            check(
                usage.prefilled <= new.length + harness.cache_block,
                f"only the {new.length} new tokens are prefilled, but {usage.prefilled} were",
            )
            check(usage.recomputed == 0, f"no KV was invalidated, but {usage.recomputed} tokens were recomputed")


@SUITE.case
def sessions_do_not_mix(harness: EngineHarness) -> None:
    """Interleaved sessions each build on their own prefix."""
    with Desk(harness) as desk:
        needs_sessions(desk)
        desk.serve()
        sessions = [desk.session() for _ in range(3)]
        for _ in range(3):
            requests = [
                desk.ask(session, harness.tokens(PROMPT_TOKENS + index)) for index, session in enumerate(sessions)
            ]
            for session, request in zip(sessions, requests, strict=True):
                desk.finish(session, request)


@SUITE.case
def a_wrong_length_misses(harness: EngineHarness) -> None:
    """A prefix of a different length is a `PrefixMiss`; then the full prompt under the same request id is served."""
    with Desk(harness) as desk:
        needs_sessions(desk)
        desk.serve()
        session = desk.session()
        desk.turn(session)
        sampled_elsewhere(session, harness.tokens(3))
        miss_then_whole(desk, session)


@SUITE.case
def a_wrong_digest_misses(harness: EngineHarness) -> None:
    """A prefix of the right length with other tokens is a `PrefixMiss`; then the full prompt is served."""
    with Desk(harness) as desk:
        needs_sessions(desk)
        if harness.tokens(1).payload is None:
            raise NotApplicable("simulated tokens have no digest")
        desk.serve()
        session = desk.session()
        desk.turn(session)
        ids = session.log.whole().ids()
        forged = Session(session.id)
        sampled_elsewhere(forged, Segment.of(np.roll(ids, 1)))
        check(forged.log.turn_digest != session.log.turn_digest, "a prompt of the harness has more than one token id")
        session = forged
        miss_then_whole(desk, session)


@SUITE.case
def an_unknown_session_misses(harness: EngineHarness) -> None:
    """An engine that never saw the session, as after a fail-over, answers `PrefixMiss` and gets the full prompt."""
    with Desk(harness) as desk:
        desk.serve()
        session = desk.session()
        sampled_elsewhere(session, harness.tokens(PROMPT_TOKENS))
        miss_then_whole(desk, session)


@SUITE.case
def an_ended_session_misses(harness: EngineHarness) -> None:
    """`EndSession`, once or twice, frees the session: continuing it is a `PrefixMiss`."""
    with Desk(harness) as desk:
        desk.serve()
        session, other = desk.session(), desk.session()
        desk.turn(session)
        desk.turn(other, harness.tokens(PROMPT_TOKENS + 2 * harness.cache_block))
        desk.drive.send(EndSession(session.id), EndSession(session.id))
        miss_then_whole(desk, session)
        if desk.info.sessions:
            check(desk.turn(other).usage.cached > 0, "ending one session leaves the others alone")


@SUITE.case
def a_full_prompt_replaces_the_session(harness: EngineHarness) -> None:
    """`prefix_length` 0 always replaces the session's content; the next turn builds on the new tokens."""
    with Desk(harness) as desk:
        desk.serve()
        session = desk.session()
        desk.turn(session, harness.tokens(20))
        rewritten = Session(session.id)
        usage = desk.turn(rewritten, harness.tokens(8)).usage
        check_prompt(usage, 8)
        if desk.info.sessions:
            desk.turn(rewritten)


def needs_sessions(desk: Desk) -> None:
    if not desk.info.sessions:
        raise NotApplicable("the engine keeps no sessions")


def check_prompt(usage: TurnUsage, length: int) -> None:
    """Every token of the prompt is accounted for once."""
    check(
        usage.prefilled + usage.cached == length,
        f"each of the {length} tokens of the prompt is prefilled or cached, but {usage.prefilled} + {usage.cached} are",
    )


def miss_then_whole(desk: Desk, session: Session) -> None:
    """Continuing the session is a miss; the same request with the full prompt is then served, once."""
    add = desk.prepare(session)
    desk.drive.send(add)
    answer = desk.answer(add.request)
    check(isinstance(answer, PrefixMiss), f"a missing prefix is a `PrefixMiss`, but the answer was {answer}")
    place = desk.drive.mark()
    whole = session.log.whole()
    desk.drive.send(msgspec.structs.replace(add, prefix_length=0, prefix_digest=b"", new=whole))
    turn = desk.finish(session, add.request, after=place)
    check_prompt(turn.usage, whole.length)
    desk.drive.settle()
    ended = [event for event in desk.drive.events[place:] if ends(event, add.request)]
    check(len(ended) == 1, f"a request ends once, but {add.request} was answered by {ended}")
    if desk.info.sessions:
        desk.turn(session)


def sampled_elsewhere(session: Session, tokens: Segment) -> None:
    """Continue the session on another engine for a turn, so that this one does not hold its prefix."""
    logprobs = None if tokens.payload is None else np.zeros(tokens.length, dtype=LOGPROB).tobytes()
    session.log.append_sampled(Generated(tokens, logprobs, (VersionRun(Version(0, 1), tokens.length),)))
