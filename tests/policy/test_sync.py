"""Weight sync as a specification: first by example, then as properties of arbitrary interleavings."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from rollart.policy.sync import STAGE_ATTEMPTS, Commands, SyncBook
from rollart.types.errors import InvariantBroken
from rollart.types.ids import WorkerId
from rollart.types.messages import (
    EngineCommand,
    Resume,
    Stage,
    Staged,
    StageFailed,
    Suspend,
    Update,
    Updated,
)
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind

V0, V1, V2, V3 = (Version(0, step) for step in range(4))
A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def manifest(version: Version) -> Manifest:
    return Manifest(version, None, WeightKind.FULL, (), (8,), ("digest",))


def stage(version: Version) -> Stage:
    return Stage(manifest(version))


def serving(*engines: WorkerId, version: Version = V0, rolling: bool = False) -> SyncBook:
    """A book whose engines serve `version`, which is the newest."""
    book = SyncBook(rolling=rolling)
    for engine in engines:
        assert book.engine_joined(engine) == []
    book.published(manifest(version))
    for engine in engines:
        book.staged(engine, version)
        book.updated(engine, version)
    return book


def all_staged(*engines: WorkerId, rolling: bool = False) -> SyncBook:
    """A book whose engines serve V0 and have staged V1."""
    book = serving(*engines, rolling=rolling)
    book.published(manifest(V1))
    for engine in engines:
        book.staged(engine, V1)
    return book


# --- the first version ----------------------------------------------------------------------------------------------


def test_before_anything_is_published_an_engine_waits() -> None:
    book = SyncBook(rolling=False)
    assert book.engine_joined(A) == []
    assert not book.in_service(A)
    assert not book.ready()
    assert book.waits_for() == []
    assert (book.served, book.newest, book.syncing) == (None, None, False)


def test_the_first_version_is_staged_then_served_without_a_sync() -> None:
    book = SyncBook(rolling=False)
    book.engine_joined(A)
    assert book.published(manifest(V0)) == [(A, [stage(V0)])]
    assert book.newest == V0
    assert book.staged(A, V0) == [(A, [Update(V0)])]
    assert not book.in_service(A), "only when it says so"
    assert book.served is None
    assert book.updated(A, V0) == []
    assert book.in_service(A)
    assert book.engines_in_service() == [A]
    assert book.served == V0


def test_an_engine_that_joins_after_the_first_publication_stages_that() -> None:
    book = SyncBook(rolling=False)
    book.published(manifest(V0))
    assert book.engine_joined(A) == [(A, [stage(V0)])]


def test_a_version_overtaken_before_it_was_served_is_skipped() -> None:
    book = SyncBook(rolling=False)
    book.engine_joined(A)
    book.published(manifest(V0))
    assert book.published(manifest(V1)) == [], "it goes on with what it is staging"
    assert book.staged(A, V0) == [(A, [stage(V1)])]
    assert book.staged(A, V1) == [(A, [Update(V1)])]
    book.updated(A, V1)
    assert book.served == V1


def test_a_version_overtaken_while_it_was_committed_is_not_the_first_in_service() -> None:
    book = SyncBook(rolling=False)
    book.engine_joined(A)
    book.published(manifest(V0))
    book.staged(A, V0)
    assert book.published(manifest(V1)) == []
    assert book.updated(A, V0) == [(A, [stage(V1)])]
    assert not book.in_service(A)
    assert book.engine_joined(B) == [(B, [stage(V1)])]


# --- publication and staging ----------------------------------------------------------------------------------------


def test_every_engine_in_service_stages_what_is_published_and_serves_on() -> None:
    book = serving(A, B)
    assert book.ready()
    assert book.published(manifest(V1)) == [(A, [stage(V1)]), (B, [stage(V1)])]
    assert book.engines_in_service() == [A, B]
    assert book.waits_for() == [A, B]
    assert not book.ready()
    assert book.staged(B, V1) == []
    assert book.waits_for() == [A]
    assert book.staged(A, V1) == []
    assert book.waits_for() == []
    assert book.ready()
    assert (book.served, book.newest) == (V0, V1)


def test_only_versions_that_may_still_be_staged_are_remembered() -> None:
    book = serving(A)
    for step in range(1, 10):
        book.published(manifest(Version(0, step)))
    assert list(book._manifests) == [V0, Version(0, 9)]


def test_versions_only_grow() -> None:
    book = serving(A, version=V1)
    for version in (V0, V1):
        with pytest.raises(InvariantBroken, match=r"was published after v0\.1: versions only grow"):
            book.published(manifest(version))
    book.published(manifest(Version(1, 0)))
    assert book.newest == Version(1, 0), "a new epoch is newer whatever its step"


def test_a_newer_publication_overtakes_one_that_is_being_staged() -> None:
    book = serving(A)
    book.published(manifest(V1))
    assert book.published(manifest(V2)) == [(A, [stage(V2)])]
    assert book.staged(A, V1) == []
    assert book.waits_for() == [A]
    assert book.stage_failed(A, V1) == [], "nobody wants it any more"
    book.staged(A, V2)
    assert book.ready()


def test_events_of_unknown_engines_and_doubled_ones_are_void() -> None:
    book = all_staged(A)
    assert book.staged(B, V1) == []
    assert book.stage_failed(B, V1) == []
    assert book.updated(B, V1) == []
    assert book.staged(A, V1) == []
    assert book.staged(A, V0) == []
    assert book.updated(A, V0) == []
    assert book.updated(A, V1) == [], "it was never told to"
    assert book.engine_left(B) == []
    assert not book.in_service(B)
    assert (book.served, book.ready()) == (V0, True)


# --- failures -------------------------------------------------------------------------------------------------------


def test_staging_is_tried_a_few_times_then_the_engine_has_to_go() -> None:
    book = serving(A)
    book.published(manifest(V1))
    assert STAGE_ATTEMPTS == 3
    assert book.stage_failed(A, V1) == [(A, [stage(V1)])]
    assert book.stage_failed(A, V1) == [(A, [stage(V1)])]
    assert book.stage_failed(A, V1) is None
    book.engine_left(A)
    assert book.ready(), "the rest goes on without it"


def test_a_new_engine_has_as_many_attempts() -> None:
    book = serving(A)
    book.engine_joined(B)
    assert book.stage_failed(B, V0) == [(B, [stage(V0)])]
    assert book.stage_failed(B, V0) == [(B, [stage(V0)])]
    assert book.stage_failed(B, V0) is None


def test_a_success_forgives_earlier_failures() -> None:
    book = serving(A)
    book.published(manifest(V1))
    book.stage_failed(A, V1)
    book.stage_failed(A, V1)
    book.staged(A, V1)
    book.published(manifest(V2))
    assert book.stage_failed(A, V2) == [(A, [stage(V2)])]
    assert book.stage_failed(A, V2) == [(A, [stage(V2)])]
    assert book.stage_failed(A, V2) is None


def test_a_failure_of_something_else_is_void() -> None:
    book = serving(A)
    assert book.stage_failed(A, V0) == []
    book.published(manifest(V1))
    assert book.stage_failed(A, V0) == []
    book.staged(A, V1)
    assert book.stage_failed(A, V1) == [], "a late one of an earlier attempt"
    assert book.ready()


def test_an_engine_that_cannot_commit_goes_at_once() -> None:
    book = all_staged(A, B)
    book.begin()
    assert book.stage_failed(A, V1) is None
    assert book.engine_left(A) == []
    assert book.updated(B, V1) == [(B, [Resume()])]
    assert book.served == V1


def test_a_new_engine_that_cannot_commit_goes_at_once_too() -> None:
    book = serving(A)
    book.engine_joined(B)
    assert book.staged(B, V0) == [(B, [Update(V0)])]
    assert book.stage_failed(B, V0) is None


def test_a_new_engine_that_failed_takes_what_is_in_service_by_then() -> None:
    book = all_staged(A)
    assert book.engine_joined(B) == [(B, [stage(V0)])]
    book.begin()
    book.updated(A, V1)
    book.published(manifest(V2))
    assert book.stage_failed(B, V0) == [(B, [stage(V1)])]


# --- the sync, all together -----------------------------------------------------------------------------------------


def test_all_engines_are_suspended_updated_and_resumed_together() -> None:
    book = all_staged(A, B)
    assert book.begin() == [(A, [Suspend(), Update(V1)]), (B, [Suspend(), Update(V1)])]
    assert book.syncing
    assert not book.ready()
    assert book.waits_for() == [A, B]
    assert book.served == V0
    assert book.updated(A, V1) == []
    assert book.waits_for() == [B]
    assert book.updated(B, V1) == [(A, [Resume()]), (B, [Resume()])]
    assert not book.syncing
    assert book.served == V1
    assert book.ready()


def test_a_sync_begins_only_when_everybody_has_staged() -> None:
    book = serving(A, B)
    book.published(manifest(V1))
    book.staged(A, V1)
    with pytest.raises(InvariantBroken, match=r"sync to v0\.1 began while \['b'\] have not staged it"):
        book.begin()
    with pytest.raises(InvariantBroken):
        SyncBook(rolling=False).begin()


def test_a_sync_begins_once() -> None:
    book = all_staged(A)
    book.begin()
    with pytest.raises(InvariantBroken):
        book.begin()


@pytest.mark.parametrize("rolling", [False, True])
def test_without_an_engine_the_run_moves_on_at_once(rolling: bool) -> None:
    book = serving(A, rolling=rolling)
    book.published(manifest(V1))
    book.engine_left(A)
    assert book.begin() == []
    assert (book.served, book.syncing) == (V1, False)
    assert book.engine_joined(B) == [(B, [stage(V1)])]


@pytest.mark.parametrize("rolling", [False, True])
def test_a_sync_is_over_when_the_last_engine_it_waits_for_leaves(rolling: bool) -> None:
    book = all_staged(A, B, rolling=rolling)
    book.begin()
    book.updated(A, V1)
    assert book.engine_left(B) == ([] if rolling else [(A, [Resume()])])
    assert (book.served, book.syncing) == (V1, False)


def test_an_engine_out_of_service_takes_no_part() -> None:
    book = all_staged(A)
    book.engine_joined(B)
    assert book.waits_for() == []
    assert book.begin() == [(A, [Suspend(), Update(V1)])]
    assert book.waits_for() == [A]


def test_what_is_published_during_a_sync_is_staged_after_it() -> None:
    book = all_staged(A, B)
    book.begin()
    assert book.published(manifest(V2)) == []
    assert book.updated(A, V1) == []
    assert book.updated(B, V1) == [(A, [Resume()]), (B, [Resume()]), (A, [stage(V2)]), (B, [stage(V2)])]
    assert (book.served, book.newest) == (V1, V2)
    assert book.waits_for() == [A, B]


# --- the sync, one by one -------------------------------------------------------------------------------------------


def test_a_rolling_update_moves_one_engine_at_a_time() -> None:
    book = all_staged(A, B, C, rolling=True)
    assert book.begin() == [(A, [Suspend(), Update(V1)])]
    assert book.waits_for() == [A]
    assert book.updated(A, V1) == [(A, [Resume()]), (B, [Suspend(), Update(V1)])]
    assert book.waits_for() == [B]
    assert book.served == V0
    assert book.updated(B, V1) == [(B, [Resume()]), (C, [Suspend(), Update(V1)])]
    assert book.updated(C, V1) == [(C, [Resume()])]
    assert (book.served, book.syncing) == (V1, False)


def test_a_rolling_update_goes_on_when_its_engine_leaves() -> None:
    book = all_staged(A, B, rolling=True)
    book.begin()
    assert book.engine_left(A) == [(B, [Suspend(), Update(V1)])]
    assert book.updated(B, V1) == [(B, [Resume()])]


def test_an_engine_whose_turn_has_not_come_may_leave() -> None:
    book = all_staged(A, B, rolling=True)
    book.begin()
    assert book.engine_left(B) == []
    assert book.updated(A, V1) == [(A, [Resume()])]
    assert not book.syncing


def test_a_late_failure_of_an_engine_whose_turn_has_not_come_is_void() -> None:
    book = all_staged(A, B, rolling=True)
    book.begin()
    assert book.stage_failed(B, V1) == []
    assert book.updated(A, V1) == [(A, [Resume()]), (B, [Suspend(), Update(V1)])]


def test_a_publication_does_not_disturb_a_rolling_update() -> None:
    book = all_staged(A, B, rolling=True)
    book.begin()
    assert book.published(manifest(V2)) == []
    assert book.updated(A, V1) == [(A, [Resume()]), (B, [Suspend(), Update(V1)])]
    assert book.updated(B, V1) == [(B, [Resume()]), (A, [stage(V2)]), (B, [stage(V2)])]


# --- engines that join late -----------------------------------------------------------------------------------------


def test_a_late_engine_serves_the_version_of_the_run_first_and_stages_the_newest_then() -> None:
    book = all_staged(A)
    assert book.engine_joined(B) == [(B, [stage(V0)])]
    assert book.staged(B, V0) == [(B, [Update(V0)])]
    assert book.ready(), "nobody waits for an engine that is not in service"
    assert book.updated(B, V0) == [(B, [stage(V1)])]
    assert book.in_service(B)
    assert book.waits_for() == [B]
    book.staged(B, V1)
    assert book.begin() == [(A, [Suspend(), Update(V1)]), (B, [Suspend(), Update(V1)])]


def test_what_is_published_while_a_late_engine_takes_its_first_version_follows() -> None:
    book = serving(A)
    book.engine_joined(B)
    assert book.published(manifest(V1)) == [(A, [stage(V1)])]
    assert book.staged(B, V0) == [(B, [Update(V0)])]
    assert book.published(manifest(V2)) == [(A, [stage(V2)])]
    assert book.updated(B, V0) == [(B, [stage(V2)])]


def test_an_engine_that_joins_during_a_sync_takes_the_version_that_is_about_to_be_served() -> None:
    book = all_staged(A)
    book.begin()
    assert book.engine_joined(B) == [(B, [stage(V1)])]
    assert book.staged(B, V1) == [(B, [Update(V1)])]
    assert book.updated(B, V1) == []
    assert book.in_service(B)
    assert book.updated(A, V1) == [(A, [Resume()])], "it was never suspended"
    assert book.served == V1


def test_a_sync_does_not_wait_for_an_engine_that_joins_during_it() -> None:
    book = all_staged(A)
    book.begin()
    book.engine_joined(B)
    assert book.staged(B, V1) == [(B, [Update(V1)])]
    assert book.waits_for() == [A]


def test_an_engine_that_enters_service_during_a_sync_stages_what_came_out_meanwhile() -> None:
    book = all_staged(A)
    book.begin()
    book.engine_joined(B)
    book.staged(B, V1)
    book.published(manifest(V2))
    assert book.updated(B, V1) == []
    assert book.updated(A, V1) == [(A, [Resume()]), (A, [stage(V2)]), (B, [stage(V2)])]


def test_if_the_run_moved_on_while_a_late_engine_staged_it_stages_again() -> None:
    book = all_staged(A)
    book.engine_joined(B)
    book.begin()
    assert book.staged(B, V0) == [(B, [stage(V1)])]
    book.updated(A, V1)
    assert book.staged(B, V1) == [(B, [Update(V1)])]


def test_if_the_run_moved_on_while_a_late_engine_committed_it_catches_up_before_it_serves() -> None:
    book = all_staged(A)
    book.engine_joined(B)
    book.staged(B, V0)
    book.begin()
    book.updated(A, V1)
    assert book.updated(B, V0) == [(B, [stage(V1)])]
    assert not book.in_service(B)
    assert book.updated(B, V0) == [], "doubled"
    assert book.staged(B, V1) == [(B, [Update(V1)])]
    book.updated(B, V1)
    assert book.engines_in_service() == [A, B]


@pytest.mark.parametrize("rolling", [False, True])
def test_a_late_engine_that_commits_the_old_version_during_a_sync_does_not_stop_it(rolling: bool) -> None:
    book = all_staged(A, rolling=rolling)
    book.engine_joined(B)
    book.staged(B, V0)
    book.begin()
    assert book.updated(B, V0) == [(B, [stage(V1)])]
    assert not book.in_service(B)
    assert book.updated(A, V1) == [(A, [Resume()])]
    assert (book.served, book.syncing) == (V1, False)


# --- any interleaving -----------------------------------------------------------------------------------------------


class Engine:
    """An engine as the port describes it: obeys in order, stages beside its work, answers everything once."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self.ready: set[Version] = set()
        self.fetching: list[Version] = []
        self.commands: deque[EngineCommand] = deque()
        self.events: deque[Staged | StageFailed | Updated] = deque()
        self.last: Staged | StageFailed | Updated | None = None
        self.suspended = False

    def obey(self) -> None:
        command = self.commands.popleft()
        if isinstance(command, Stage):
            version = command.manifest.version
            if version == self.version or version in self.ready:
                self.events.append(Staged(version))
            elif version not in self.fetching:
                self.fetching.append(version)
        elif isinstance(command, Update):
            version = command.version
            assert version == self.version or version in self.ready, f"update to {version}, which is not staged"
            assert self.version is None or version >= self.version, "versions never go down"
            self.version = version
            self.ready = {other for other in self.ready if other > version}
            self.events.append(Updated(version))

    def fetched(self, good: bool) -> None:
        version = self.fetching.pop(0)
        if good:
            self.ready.add(version)
        self.events.append(Staged(version) if good else StageFailed(version, "cut"))


class Interleavings(RuleBasedStateMachine):
    """Engines that join, leave, fail and answer at any time, while versions are published and adopted."""

    @initialize(rolling=st.booleans())
    def begin_run(self, rolling: bool) -> None:
        self.book = SyncBook(rolling=rolling)
        self.engines: dict[WorkerId, Engine] = {}
        self.joined = 0
        self.published = -1
        self.target: Version | None = None
        self.served: Version | None = None

    def some(self, data: st.DataObject, *having: str) -> tuple[WorkerId, Engine] | None:
        able = [(id, engine) for id, engine in self.engines.items() if all(getattr(engine, name) for name in having)]
        return data.draw(st.sampled_from(able)) if able else None

    def send(self, commands: Commands) -> None:
        for id, batch in commands:
            engine = self.engines[id]
            for command in batch:
                if isinstance(command, Suspend):
                    assert not engine.suspended
                    engine.suspended = True
                elif isinstance(command, Resume):
                    assert engine.suspended
                    engine.suspended = False
                elif isinstance(command, Stage) and not self.book.in_service(id):
                    assert command.manifest.version == (self.target or self.book.served or self.book.newest), (
                        "a new engine gets the version in service first, and never a newer one"
                    )
                elif isinstance(command, Update):
                    assert command.version == (self.target or self.book.served or self.book.newest)
            engine.commands.extend(batch)
        if not self.book.syncing:
            self.target = None

    def tell(self, id: WorkerId, event: Staged | StageFailed | Updated) -> None:
        if isinstance(event, Staged):
            self.send(self.book.staged(id, event.version))
        elif isinstance(event, Updated):
            self.send(self.book.updated(id, event.version))
        else:
            commands = self.book.stage_failed(id, event.version)
            if commands is None:
                self.remove(id)
            else:
                self.send(commands)

    def remove(self, id: WorkerId) -> None:
        del self.engines[id]
        self.send(self.book.engine_left(id))

    @rule()
    def join(self) -> None:
        if len(self.engines) < 4:
            self.joined += 1
            id = WorkerId(f"engine {self.joined}")
            self.engines[id] = Engine()
            self.send(self.book.engine_joined(id))

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), unlikely=st.integers(0, 2))
    def leave(self, data: st.DataObject, unlikely: int) -> None:
        if unlikely == 0:
            self.remove(data.draw(st.sampled_from(list(self.engines))))

    @rule()
    def publish(self) -> None:
        self.published += 1
        self.send(self.book.published(manifest(Version(0, self.published))))

    @precondition(lambda self: self.book.ready())
    @rule()
    def begin_sync(self) -> None:
        self.target = self.book.newest
        self.send(self.book.begin())

    @rule(data=st.data(), how_many=st.integers(1, 4))
    def an_engine_obeys(self, data: st.DataObject, how_many: int) -> None:
        found = self.some(data, "commands")
        if found is not None:
            for _ in range(min(how_many, len(found[1].commands))):
                found[1].obey()

    @rule(data=st.data(), good=st.sampled_from([True, True, True, False]))
    def an_engine_fetches(self, data: st.DataObject, good: bool) -> None:
        found = self.some(data, "fetching")
        if found is not None:
            found[1].fetched(good)

    @rule(data=st.data())
    def an_event_arrives(self, data: st.DataObject) -> None:
        found = self.some(data, "events")
        if found is not None:
            found[1].last = found[1].events.popleft()
            self.tell(found[0], found[1].last)

    @rule(data=st.data())
    def an_event_arrives_again(self, data: st.DataObject) -> None:
        found = self.some(data, "last")
        if found is not None and found[1].last is not None and not isinstance(found[1].last, StageFailed):
            self.tell(found[0], found[1].last)

    @rule()
    def everybody_answers(self) -> None:
        """Once all that was asked is answered, nothing is left open."""
        while any(engine.commands or engine.fetching or engine.events for engine in self.engines.values()):
            for id, engine in list(self.engines.items()):
                while engine.commands:
                    engine.obey()
                while engine.fetching:
                    engine.fetched(good=True)
                while engine.events and id in self.engines:
                    self.tell(id, engine.events.popleft())
        assert not self.book.syncing
        assert self.book.waits_for() == []
        if self.book.newest is not None:
            assert self.book.ready()
            assert self.book.engines_in_service() == list(self.engines)
            for engine in self.engines.values():
                assert engine.version == self.book.served
                assert engine.version == self.book.newest or self.book.newest in engine.ready

    @invariant()
    def engines_in_service_have_one_of_two_versions(self) -> None:
        for id in self.book.engines_in_service():
            version = self.engines[id].version
            assert version is not None
            assert version in (self.book.served, self.target)

    @invariant()
    def the_version_of_the_run_never_goes_down(self) -> None:
        if self.served is not None:
            assert self.book.served is not None
            assert self.book.served >= self.served
        self.served = self.book.served

    @invariant()
    def nobody_stays_suspended(self) -> None:
        if not self.book.syncing:
            assert not any(engine.suspended for engine in self.engines.values())

    @invariant()
    def a_sync_waits_for_somebody_who_is_there(self) -> None:
        waits = self.book.waits_for()
        assert all(id in self.engines and self.book.in_service(id) for id in waits)
        assert waits or not self.book.syncing

    def teardown(self) -> None:
        if hasattr(self, "book"):
            self.everybody_answers()


def test_the_rules_hold_in_any_interleaving() -> None:
    run_machine(
        Interleavings, settings=settings(max_examples=120, stateful_step_count=50, deadline=None, print_blob=False)
    )
