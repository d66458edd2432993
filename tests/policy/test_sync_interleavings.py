"""Weight sync as properties of arbitrary interleavings."""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from sync_parts import manifest

from rollart.policy.sync import Commands, SyncBook
from rollart.types.ids import WorkerId
from rollart.types.messages import EngineCommand, Resume, Stage, Staged, StageFailed, Suspend, Update, Updated
from rollart.types.versions import Version


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
