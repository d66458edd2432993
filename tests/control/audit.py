"""What every run is held to: the rules of the design by the product's own audit, and a few things it cannot know."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from worlds import Ran, Tap

from rollart.observe.audit import audit as rules
from rollart.types import journal as j
from rollart.types.failures import StopReason
from rollart.types.ids import RequestId, TrajectoryId, WorkerId
from rollart.types.messages import Add, Observed, Progress, Role, TurnDone


def audit(events: Sequence[j.JournalEvent], killed: Iterable[WorkerId] = ()) -> list[str]:
    """Every violation as a line; none in a sound journal."""
    problems = [str(violation) for violation in rules(events)]
    if not isinstance(events[-1], j.RunEnded):
        problems.append(f"the journal ends with {type(events[-1]).__name__}")
    died = {event.worker for event in events if isinstance(event, j.WorkerDied)}
    problems += [f"{worker} was killed and the journal does not say so" for worker in killed if worker not in died]
    return problems + engine_time(events)


def engine_time(events: Sequence[j.JournalEvent]) -> list[str]:
    """The causes of a pool of engines add up to the time that they were there."""
    problems: list[str] = []
    died_at = {event.worker: event for event in events if isinstance(event, j.WorkerDied | j.WorkerLeft)}
    pool_of = {e.worker: e.pool for e in events if isinstance(e, j.WorkerSpawned) if e.role is Role.ENGINE}
    there: Counter[str] = Counter()
    for event in events:
        if isinstance(event, j.WorkerJoined) and event.worker in pool_of:
            died = died_at.get(event.worker)
            there[pool_of[event.worker]] += (died or events[-1]).at - event.at  # type: ignore[assignment]
    told: Counter[str] = Counter()
    for event in events:
        if isinstance(event, j.PoolTime) and event.pool in there:
            told[event.pool] += sum(event.seconds.values())  # type: ignore[assignment]
    for pool, seconds in there.items():
        if not math.isclose(seconds, told[pool], rel_tol=1e-9, abs_tol=1e-6):
            problems.append(f"the engines of {pool} were there for {seconds} s, {told[pool]} s are accounted for")
    return problems


def lengths_add_up(tap: Tap) -> list[str]:
    """Whether every request named exactly the tokens that the trajectory had by then, as told to the controller.

    `tap` stands next to the controller: it saw what arrived and what was sent.
    """
    problems: list[str] = []
    known: Counter[TrajectoryId] = Counter()
    session_of: dict[RequestId, TrajectoryId] = {}
    for _, _, message in tap.both:
        match message:
            case Observed():
                known[message.episode] += message.observation.length
            case Progress():
                for request, generated in message.parts:
                    known[session_of[request]] += generated.tokens.length
            case TurnDone():
                known[session_of[message.request]] += message.generated.tokens.length
            case Add():
                session_of[message.request] = message.session
                if message.prefix_length + message.new.length != known[message.session]:
                    problems.append(f"{message.session} has {known[message.session]} tokens, was sent as {message}")
            case _:
                pass
    return problems


def sound(ran: Ran) -> None:
    """The journal keeps every rule, and the run left nothing behind."""
    assert audit(ran.events, ran.killed) == []
    assert ran.complaints == []
    assert ran.tasks_left == []


def completed(ran: Ran) -> None:
    """Sound, and all steps were done."""
    sound(ran)
    assert ran.error is None
    last = ran.events[-1]
    assert isinstance(last, j.RunEnded)
    assert (last.stop, last.reason) == (StopReason.DONE, "")
