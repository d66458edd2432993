"""The buffer as a specification: first by example, then as properties of arbitrary histories."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rollart.policy.buffer import BufferBook, ReadyGroup
from rollart.types.errors import InvariantBroken
from rollart.types.ids import ClaimId, GroupId
from rollart.types.versions import Version

C1, C2 = ClaimId(1), ClaimId(2)


def ready(id: int, task: str = "maze", step: int = 0) -> ReadyGroup:
    return ReadyGroup(GroupId(id), task, Version(0, step))


def book(*groups: ReadyGroup) -> BufferBook:
    made = BufferBook()
    for group in groups:
        made.add(group)
    return made


def ids(groups: list[ReadyGroup]) -> list[int]:
    return [group.id for group in groups]


# --- what is ready --------------------------------------------------------------------------------------------------


def test_groups_are_counted_by_task() -> None:
    assert book().counts() == {}
    groups = book(ready(1), ready(2, "math"), ready(3))
    assert groups.counts() == {"maze": 2, "math": 1}
    assert ids(groups.ready()) == [1, 3, 2]
    groups.remove(GroupId(1))
    assert groups.counts() == {"maze": 1, "math": 1}


def test_a_group_that_changed_keeps_its_place() -> None:
    groups = book(ready(1), ready(2), ready(3))
    groups.replace(ready(2, step=1))
    assert groups.ready() == [ready(1), ready(2, step=1), ready(3)]


def test_a_group_leaves_once() -> None:
    groups = book(ready(1))
    groups.remove(GroupId(1))
    with pytest.raises(InvariantBroken, match="group 1 is not ready"):
        groups.remove(GroupId(1))


# --- claims ---------------------------------------------------------------------------------------------------------


def test_a_claim_takes_of_every_task_those_that_were_ready_first() -> None:
    groups = book(ready(1), ready(2, "math"), ready(3), ready(4), ready(5, "math"))
    taken = groups.claim(C1, {"maze": 2, "math": 1})
    assert ids(taken) == [1, 3, 2]
    assert ids(groups.ready()) == [4, 5]
    assert groups.claims() == [C1]


def test_groups_of_older_weights_are_claimed_first() -> None:
    """A group that took long is not left behind until it is stale."""
    groups = book(ready(1, step=2), ready(2, step=1), ready(3, step=2))
    assert ids(groups.claim(C1, {"maze": 2})) == [2, 1]
    assert ids(groups.ready()) == [3]


def test_age_counts_in_steps_across_a_roll_back() -> None:
    groups = book(ready(1, step=5), ReadyGroup(GroupId(2), "maze", Version(1, 4)))
    assert ids(groups.claim(C1, {"maze": 1})) == [2]


def test_a_task_without_a_part_in_the_batch_is_left_alone() -> None:
    groups = book(ready(1), ready(2, "math"))
    assert ids(groups.claim(C1, {"maze": 1, "math": 0, "unknown": 0})) == [1]
    assert ids(groups.ready()) == [2]


def test_a_claim_is_whole_or_nothing() -> None:
    groups = book(ready(1), ready(2, "math"))
    with pytest.raises(InvariantBroken, match="claim 1 wants 2 groups of math, 1 are ready"):
        groups.claim(C1, {"maze": 1, "math": 2})
    with pytest.raises(InvariantBroken, match="claim 1 wants 1 groups of unknown, 0 are ready"):
        groups.claim(C1, {"maze": 1, "unknown": 1})
    assert ids(groups.ready()) == [1, 2]
    assert groups.claims() == []


def test_a_trained_claim_is_over() -> None:
    groups = book(ready(1), ready(2))
    groups.claim(C1, {"maze": 2})
    assert ids(groups.trained(C1)) == [1, 2]
    assert groups.claims() == []
    assert groups.ready() == []
    with pytest.raises(KeyError):
        groups.trained(C1)
    with pytest.raises(KeyError):
        groups.returned(C1)


def test_a_returned_claim_puts_its_groups_back_where_they_were() -> None:
    groups = book(ready(1), ready(2), ready(3, "math"), ready(4))
    groups.claim(C1, {"maze": 2, "math": 1})
    groups.add(ready(5))
    groups.add(ready(6, "math"))
    assert ids(groups.returned(C1)) == [1, 2, 3]
    assert groups.claims() == []
    assert ids(groups.claim(C2, {"maze": 4, "math": 2})) == [1, 2, 4, 5, 3, 6]


@pytest.mark.parametrize("order", [(C1, C2), (C2, C1)])
def test_claims_may_be_returned_in_any_order(order: tuple[ClaimId, ClaimId]) -> None:
    groups = book(ready(1), ready(2), ready(3))
    groups.claim(C1, {"maze": 1})
    groups.claim(C2, {"maze": 1})
    for claim in order:
        groups.returned(claim)
    assert ids(groups.ready()) == [1, 2, 3]


def test_groups_that_left_are_forgotten() -> None:
    groups = book(ready(1), ready(2))
    groups.remove(GroupId(1))
    groups.claim(C1, {"maze": 1})
    groups.trained(C1)
    assert groups._places == {}


def test_a_ready_group_does_not_change() -> None:
    with pytest.raises(AttributeError):
        ready(1).oldest = Version(0, 9)  # type: ignore[misc]


# --- any history ----------------------------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """Groups that come in, change, go stale, are claimed, trained and returned in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.book = BufferBook()
        self.served = 0
        self.groups: list[ReadyGroup] = []
        """Every group that came in, in this order."""
        self.place: dict[int, str | ClaimId] = {}
        self.claims = 0

    def expected(self, task: str) -> list[ReadyGroup]:
        return [group for group in self.groups if group.task == task and self.place[group.id] == "ready"]

    @rule(task=st.sampled_from(["maze", "math"]), age=st.integers(0, 1))
    def add(self, task: str, age: int) -> None:
        group = ready(len(self.groups), task, max(0, self.served - age))
        self.groups.append(group)
        self.place[group.id] = "ready"
        self.book.add(group)

    @rule()
    def update(self) -> None:
        self.served += 1

    @precondition(lambda self: self.book.ready())
    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.book.ready()))
        younger = ready(group.id, group.task, self.served)
        self.groups[group.id] = younger
        self.book.replace(younger)

    @precondition(lambda self: self.book.ready())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.book.ready()))
        self.book.remove(group.id)
        self.place[group.id] = "dropped"

    @rule(data=st.data(), too_many=st.sampled_from([0, 0, 0, 1]))
    def claim(self, data: st.DataObject, too_many: int) -> None:
        maze = data.draw(st.integers(0, len(self.expected("maze")))) + too_many
        math = data.draw(st.integers(0, len(self.expected("math"))))
        need = {"maze": maze, "math": math}
        self.claims += 1
        id = ClaimId(self.claims)
        by_age = {task: sorted(self.expected(task), key=lambda group: group.oldest.step) for task in need}
        wanted = [group for task, count in need.items() for group in by_age[task][:count]]
        if len(wanted) < maze + math:
            with pytest.raises(InvariantBroken):
                self.book.claim(id, need)
            return
        assert self.book.claim(id, need) == wanted
        for group in wanted:
            self.place[group.id] = id

    @precondition(lambda self: self.book.claims())
    @rule(data=st.data(), trained=st.booleans())
    def claim_ends(self, data: st.DataObject, trained: bool) -> None:
        id = data.draw(st.sampled_from(self.book.claims()))
        ended = self.book.trained(id) if trained else self.book.returned(id)
        assert sorted(ids(ended)) == [group for group, place in self.place.items() if place == id]
        for group in ended:
            self.place[group.id] = "trained" if trained else "ready"

    @invariant()
    def every_group_is_in_one_place_and_in_order(self) -> None:
        for task in ("maze", "math"):
            assert [group for group in self.book.ready() if group.task == task] == self.expected(task)
            assert self.book.counts().get(task, 0) == len(self.expected(task))


def test_the_rules_hold_in_any_history() -> None:
    run_state_machine_as_test(
        Histories, settings=settings(max_examples=80, stateful_step_count=40, deadline=None, print_blob=False)
    )
