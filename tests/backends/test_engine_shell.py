"""The shell of engines, where the conformance suite does not reach: answers that come late, limits, and silence."""

from collections.abc import Iterable

import numpy as np
import pytest

from rollart.backends.engines import shell
from rollart.backends.engines.sessions import Session, Sessions, Turn
from rollart.backends.engines.shell import EngineSettings, EngineShell, Reported, Steps
from rollart.backends.engines.staging import Staging
from rollart.backends.engines.stepped_engine import SteppedEngine
from rollart.backends.stores.memory import MemoryStore
from rollart.ports.worker import Advance
from rollart.types.errors import InvariantBroken
from rollart.types.ids import ClaimId, RequestId, TrajectoryId
from rollart.types.messages import (
    Abort,
    Add,
    EndSession,
    FinishReason,
    KvOnUpdate,
    PrefixMiss,
    Progress,
    Refused,
    Resume,
    Sampling,
    Stage,
    Staged,
    StageFailed,
    Suspend,
    Train,
    TurnDone,
    TurnUsage,
    Update,
    Updated,
    WorkerEvent,
)
from rollart.types.tokens import LOGPROB, Generated, Segment, VersionRun, prefix_digest
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind

V1, V2, V3 = Version(0, 1), Version(0, 2), Version(0, 3)
INTERVAL_S = 10.0
SETTINGS = EngineSettings(model="", store=None, max_context=32, progress_interval_s=INTERVAL_S)
INFO = SETTINGS.info(KvOnUpdate.RECOMPUTE)


class RemoteEngine(EngineShell[Session, Turn]):
    """Generates elsewhere: records what it was asked to do, and reports what the test puts into `reports`."""

    def __init__(self, version: Version | None = V1) -> None:
        super().__init__(INFO, Sessions(Session), vocabulary=100, version=version)
        self.asked: list[str] = []
        self.reports: list[Reported] = []
        self.answers = True
        self.steps = 0

    def advance(self, now: float) -> Advance:
        events: list[WorkerEvent] = []
        reports, self.reports = self.reports, []
        self._note(reports, events)
        self._obey_commands(events)
        self._report(now, events)
        return Advance(events, self._report_at)

    def turn(self, request: int) -> Turn:
        return self._turns[RequestId(request)]

    def held(self, session: int) -> list[int]:
        found = self._sessions.get(TrajectoryId(session))
        return [] if found is None else found.tokens().tolist()

    def _refuses(self, sampling: Sampling) -> str:
        return "no top-k here" if sampling.top_k else ""

    def _start(self, add: Add, session: Session) -> Turn:
        self.asked.append(f"start {add.request}")
        return Turn(add, session)

    def _abort(self, turn: Turn) -> None:
        self.asked.append(f"abort {turn.request}")

    def _suspend(self) -> None:
        self.asked.append("suspend")

    def _resume(self) -> None:
        self.asked.append("resume")

    def _fetch(self, manifest: Manifest) -> None:
        self.asked.append(f"fetch {manifest.version}")

    def _swap(self, version: Version) -> bool:
        self.asked.append(f"swap {version}")
        return False

    def _steps_taken(self) -> Steps | None:
        steps, self.steps = self.steps, 0
        return Steps(steps) if self.answers else None


def send(engine, *commands, now=0.0):
    engine.post(commands)
    return engine.advance(now).events


def add(request, new=(1, 2, 3), *, session=1, prefix=(), **sampling):
    digest = prefix_digest(np.array(prefix, dtype="<i4").tobytes()) if prefix else b""
    options = {"max_tokens": 8} | sampling
    return Add(
        RequestId(request),
        TrajectoryId(session),
        "task",
        len(prefix),
        digest,
        new if isinstance(new, Segment) else Segment.of(list(new)),
        Sampling(**options),
    )


def manifest(version):
    return Manifest(version, None, WeightKind.FULL, (), (), ())


def generated(tokens, logprobs, *runs):
    return Generated(Segment.of(tokens), np.array(logprobs, dtype=LOGPROB).tobytes(), tuple(runs))


# --- turns


def test_an_abort_is_answered_when_the_engine_reports_the_end():
    engine = RemoteEngine()
    assert send(engine, add(1)) == []
    assert send(engine, Abort(RequestId(1)), Abort(RequestId(1)), Abort(RequestId(7))) == []
    assert engine.asked == ["start 1", "abort 1", "abort 1"]
    turn = engine.turn(1)
    turn.take([9], [-1.0], [VersionRun(V1, 1)])  # sampled before the abort got there
    done = turn.done(FinishReason.ABORTED)
    engine.reports = [done]
    assert send(engine) == [done]
    assert engine.held(1) == [1, 2, 3, 9]
    assert send(engine, Abort(RequestId(1))) == []
    assert engine.asked[3:] == []


def test_a_superseded_turn_reports_its_tokens_and_the_session_goes_on_without_them():
    engine = RemoteEngine()
    send(engine, add(1))
    older = engine.turn(1)
    older.take([9], [-1.0], [VersionRun(V1, 1)])
    send(engine, add(2, [4], prefix=(1, 2, 3)))
    assert engine.asked == ["start 1", "abort 1", "start 2"]
    assert not older.is_current
    older.take([8], [-2.0], [VersionRun(V1, 1)])
    engine.turn(2).take([7], [-3.0], [VersionRun(V1, 1)])
    assert engine.held(1) == [1, 2, 3, 4, 7]
    done = older.done(FinishReason.ABORTED)
    assert done.generated == generated([9, 8], [-1.0, -2.0], VersionRun(V1, 2))
    engine.reports = [done]
    assert send(engine) == [done]
    assert engine.turn(2).is_current  # the end of the older turn is not the end of the newer one


def test_a_session_that_ended_is_not_touched_by_its_turn():
    engine = RemoteEngine()
    send(engine, add(1), EndSession(TrajectoryId(1)), EndSession(TrajectoryId(1)), EndSession(TrajectoryId(5)))
    assert engine.asked == ["start 1", "abort 1"]
    assert engine.held(1) == []
    send(engine, add(2, [5, 6]))
    engine.turn(1).take([9], [-1.0], [VersionRun(V1, 1)])
    engine.reports = [engine.turn(1).done(FinishReason.ABORTED)]
    send(engine)
    assert engine.held(1) == [5, 6]
    assert engine.turn(2).is_current


def test_an_engine_may_refuse_late():
    engine = RemoteEngine()
    send(engine, add(1))
    engine.reports = [Refused(RequestId(1), "too hot")]
    assert send(engine) == [Refused(RequestId(1), "too hot")]
    assert send(engine, add(1)) == []  # it was taken once: a duplicate
    assert engine.asked == ["start 1"]


def test_only_requests_that_were_taken_are_remembered_and_the_oldest_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(shell, "REMEMBERED_REQUESTS", 2)
    engine = RemoteEngine()
    assert send(engine, add(1, prefix=(5,))) == [PrefixMiss(RequestId(1))]
    assert send(engine, add(1, top_k=3)) == [Refused(RequestId(1), "no top-k here")]
    for request in (1, 2):
        send(engine, add(request, session=request))
    send(engine, add(1), add(2))
    assert engine.asked == ["start 1", "start 2"]
    send(engine, add(3, session=3), add(2, session=2), add(3, session=3))
    assert engine.asked == ["start 1", "start 2", "start 3"]
    engine.reports = [engine.turn(1).done(FinishReason.STOP)]
    send(engine, add(1))
    assert engine.asked[3:] == ["start 1"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (add(1, max_tokens=0), "cannot sample 0 tokens"),
        (add(1, temperature=-0.5), "temperature -0.5"),
        (add(1, temperature=float("nan")), "temperature nan"),
        (add(1, []), "a context of 0 tokens, but this engine takes 1 to 31 by its max_context"),
        (add(1, [1] * 32), "a context of 32 tokens"),
        (add(1, Segment(3)), "a simulated segment"),
        (add(1, [99, 100]), "tokens from 99 to 100, but the vocabulary has 100"),
        (add(1, [-1]), "tokens from -1 to -1"),
    ],
)
def test_what_no_engine_can_serve_is_refused(bad, reason):
    engine = RemoteEngine()
    (refused,) = send(engine, bad)
    assert isinstance(refused, Refused)
    assert reason in refused.reason
    assert send(engine, add(1, [99] * 31)) == []  # the longest that can be


def test_a_prefix_may_be_shorter_than_what_is_held():
    engine = RemoteEngine()
    send(engine, add(1, [1, 2, 3, 4]))
    assert send(engine, add(2, [9], prefix=(1, 2))) == []
    assert engine.held(1) == [1, 2, 9]
    for not_held in ((1, 2, 3), (1, 2, 9, 4)):  # the second is what the buffer of the log still contains
        assert send(engine, add(3, [9], prefix=not_held)) == [PrefixMiss(RequestId(3))]
    assert engine.asked == ["start 1", "abort 1", "start 2"]


def test_a_command_of_another_role_is_a_bug():
    with pytest.raises(InvariantBroken, match="an engine does not take Train"):
        send(RemoteEngine(), Train(ClaimId(1), V1, ()))


# --- versions


def test_a_version_is_fetched_once_and_again_after_it_failed():
    engine = RemoteEngine()
    assert send(engine, Stage(manifest(V2)), Stage(manifest(V2))) == []
    assert engine.asked == ["fetch v0.2"]
    failed = StageFailed(V2, "gone")
    engine.reports = [failed]
    assert send(engine, Stage(manifest(V2))) == [failed]
    assert engine.asked == ["fetch v0.2", "fetch v0.2"]
    engine.reports = [Staged(V2)]
    assert send(engine, Stage(manifest(V2))) == [Staged(V2), Staged(V2)]
    assert engine.asked[2:] == []


def test_while_a_version_is_loaded_stage_and_update_wait_and_all_that_follows_them():
    engine = RemoteEngine(version=None)
    send(engine, Stage(manifest(V1)), Stage(manifest(V2)))
    engine.reports = [Staged(V1), Staged(V2)]
    assert send(engine, Update(V1)) == [Staged(V1), Staged(V2)]
    # A request can be served as soon as the version is there.
    assert send(engine, add(1), Update(V2), add(2, session=2), Suspend()) == []
    assert engine.asked == ["fetch v0.1", "fetch v0.2", "swap v0.1", "start 1"]
    engine.reports = [Updated(V1)]
    assert send(engine) == [Updated(V1)]
    assert engine.asked[4:] == ["swap v0.2", "start 2", "suspend"]
    engine.reports = [Updated(V2)]
    assert send(engine, Update(V2), Stage(manifest(V2)), Resume()) == [Updated(V2), Updated(V2), Staged(V2)]
    assert engine.asked[7:] == ["resume"]


def test_versions_below_the_one_in_service_are_forgotten():
    engine = RemoteEngine()
    send(engine, Stage(manifest(V2)), Stage(manifest(V3)))
    engine.reports = [Staged(V2), Staged(V3)]
    send(engine, Update(V3))
    engine.reports = [Updated(V3)]
    (_, older, not_staged) = send(engine, Update(V2), Update(Version(1, 0)))
    assert older == StageFailed(V2, "v0.3 is in service; versions only grow")
    assert not_staged == StageFailed(Version(1, 0), "v1.0 is not staged here; stage it and wait for Staged")
    assert send(engine, Stage(manifest(V2))) == [older]


# --- reports


def test_reports_come_twice_per_interval_with_what_is_new():
    engine = RemoteEngine()
    engine.post([add(1), add(2, session=2)])
    assert engine.advance(0.0) == Advance([], INTERVAL_S / 2)
    engine.turn(2).take([7, 8], [-1.0, -2.0], [VersionRun(V1, 1), VersionRun(V2, 1)])
    engine.steps = 3
    assert send(engine, now=4.9) == []
    part = generated([7, 8], [-1.0, -2.0], VersionRun(V1, 1), VersionRun(V2, 1))
    assert engine.advance(5.0) == Advance([Progress(((RequestId(2), part),), 3)], 10.0)
    assert send(engine, now=10.0) == [Progress((), 0)]


def test_a_silent_engine_keeps_what_it_has_not_reported():
    engine = RemoteEngine()
    send(engine, add(1))
    engine.turn(1).take([7], [-1.0], [VersionRun(V1, 1)])
    engine.answers = False
    assert send(engine, now=5.0) == []
    engine.answers = True
    assert send(engine, now=9.9) == []
    (progress,) = send(engine, now=10.0)
    assert progress.parts == ((RequestId(1), generated([7], [-1.0], VersionRun(V1, 1))),)


def test_a_suspended_engine_does_not_report_and_an_overdue_report_comes_with_the_next_work():
    engine = RemoteEngine()
    send(engine, add(1))
    assert send(engine, Suspend(), now=6.0) == []
    assert send(engine, now=60.0) == []
    assert send(engine, Resume(), now=61.0) == [Progress((), 0)]
    engine.reports = [TurnDone(RequestId(1), generated([], []), FinishReason.STOP, TurnUsage())]
    assert len(send(engine, now=70.0)) == 1  # its end, and no report


# --- engines that step


class RecordingSessions(Sessions[Session]):
    def __init__(self) -> None:
        super().__init__(Session)
        self.settled: list[int] = []

    def settle(self, session: Session) -> None:
        self.settled.append(session.id)


class CountingEngine(SteppedEngine[Session, Turn, dict]):
    """Every step gives every turn the token 5, and ends those that have enough."""

    def __init__(self, store: MemoryStore) -> None:
        self.sessions = RecordingSessions()
        super().__init__(INFO, self.sessions, Staging(store, {}), vocabulary=100, version=V1)

    def _refuses(self, sampling: Sampling) -> str:  # noqa: ARG002 - takes anything
        return ""

    def _start(self, add: Add, session: Session) -> Turn:
        return Turn(add, session)

    def _abort(self, turn: Turn) -> TurnDone:
        return turn.done(FinishReason.ABORTED)

    def _swap(self, version: Version) -> bool:
        self._staging.take(version)
        return True

    def _step(self) -> Iterable[TurnDone]:
        for turn in self._turns.values():
            turn.take_one(5, -1.0, self._version or V1)
        return [
            turn.done(FinishReason.LENGTH) for turn in self._turns.values() if turn.sampled == turn.sampling.max_tokens
        ]


def published(store, version):
    whole = manifest(version)
    store.publish(whole, [])
    return whole


def test_a_stepped_engine_asks_to_be_called_while_it_has_turns():
    engine = CountingEngine(MemoryStore())
    engine.post([add(1, max_tokens=2), add(2, session=2, max_tokens=2)])
    assert engine.advance(1.0) == Advance([], 1.0)
    engine.post([Abort(RequestId(2)), Suspend()])
    advance = engine.advance(2.0)
    (aborted,) = advance.events
    assert (aborted.generated.tokens, aborted.finish) == (Segment.of([5]), FinishReason.ABORTED)
    assert advance.wake_at is None
    engine.post([Resume()])
    advance = engine.advance(3.0)
    (done,) = advance.events
    assert (done.request, done.generated.tokens) == (RequestId(1), Segment.of([5, 5]))
    assert advance.wake_at is None


def test_a_session_settles_with_its_turn_unless_it_goes_on():
    engine = CountingEngine(MemoryStore())
    send(engine, add(1, max_tokens=20), add(2, session=2, max_tokens=1), add(3, session=3, max_tokens=20))
    assert engine.sessions.settled == [2]
    aborted, _ = send(engine, add(4, [6], prefix=(1, 2, 3), max_tokens=1), EndSession(TrajectoryId(3)))[:2]
    assert (aborted.request, aborted.finish) == (RequestId(1), FinishReason.ABORTED)
    assert engine.sessions.settled == [2, 1]  # at the end of request 4


def test_a_staged_version_is_reported_before_the_step_and_served_at_once():
    store = MemoryStore()
    engine = CountingEngine(store)
    send(engine, add(1, max_tokens=2))
    engine.post([Stage(published(store, V2))])
    assert engine.advance(1.0) == Advance([Staged(V2)], 1.0)  # and no step was taken
    engine.post([Update(V2)])
    updated, done = engine.advance(2.0).events
    assert updated == Updated(V2)
    assert done.generated.runs == (VersionRun(V1, 1), VersionRun(V2, 1))


def test_a_stepped_engine_reports_its_steps_and_what_they_took():
    engine = CountingEngine(MemoryStore())
    send(engine, add(1, max_tokens=20), now=0.0)
    send(engine, now=1.0)
    (progress,) = send(engine, now=5.0)
    assert progress.parts == ((RequestId(1), generated([5, 5, 5], [-1.0, -1.0, -1.0], VersionRun(V1, 3))),)
    assert progress.steps == 3
    assert progress.stepping_s > 0
    (progress,) = send(engine, now=10.0)
    assert progress.steps == 1
