"""Groups as a specification: first by example, then as properties of arbitrary histories."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rollart.policy.groups import MAX_PROMPT_ATTEMPTS, GroupBook, OpenGroup, Ticket
from rollart.policy.staleness import StalenessBound
from rollart.types.errors import InvariantBroken
from rollart.types.ids import GroupId, PromptId, TrajectoryId
from rollart.types.trajectory import FAILURES, TRAINABLE, Outcome, Prompt, Purpose
from rollart.types.versions import Version

V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)
G = GroupId(1)
BOUND = StalenessBound(1, check_every_turn=True)


def ticket(task: str = "maze", **history: int) -> Ticket:
    return Ticket(7, Prompt(PromptId("7"), task, 7), **history)


def book(size: int = 2, extra: int = 0, started: Sequence[int] = ()) -> GroupBook:
    """A book with the training group 1, and these of its members started."""
    made = GroupBook()
    made.open(G, ticket(), Purpose.TRAIN, size=size, extra=extra, bound=BOUND)
    for member in started:
        made.member_started(G, TrajectoryId(member))
    return made


def end(groups: GroupBook, member: int, outcome: Outcome = Outcome.COMPLETED) -> OpenGroup:
    return groups.member_ended(G, TrajectoryId(member), outcome)


# --- starting members -----------------------------------------------------------------------------------------------


def test_a_group_wants_its_size_and_its_extra_members() -> None:
    groups = book(size=3, extra=2)
    assert groups[G].wanted == 5
    groups.member_started(G, TrajectoryId(1))
    assert groups[G].wanted == 4
    end(groups, 1)
    assert groups[G].wanted == 4, "one with a result is not started again"


def test_a_failed_member_is_replaced_and_one_with_a_result_is_not() -> None:
    groups = book(size=2, started=[1, 2])
    assert groups.short_of_members("maze") is None
    end(groups, 1, Outcome.ENV_FAILED)
    assert groups[G].wanted == 1
    assert groups.short_of_members("maze") is groups[G]


def test_wanted_is_never_negative() -> None:
    groups = book(size=1, started=[1, 2, 3])
    assert groups[G].wanted == 0


def test_members_are_numbered_from_the_ticket_and_numbers_are_never_reused() -> None:
    groups = GroupBook()
    groups.open(G, ticket(next_member=5), Purpose.TRAIN, size=2, extra=0, bound=BOUND)
    assert groups.member_started(G, TrajectoryId(1)) == 5
    end(groups, 1, Outcome.ENGINE_FAILED)
    assert groups.member_started(G, TrajectoryId(2)) == 6
    assert groups.member_started(G, TrajectoryId(3)) == 7
    assert groups[G].requeued(failed=False, stale=False).next_member == 8


def test_the_oldest_group_of_a_task_that_is_short_comes_first() -> None:
    groups = GroupBook()
    first = groups.open(GroupId(1), ticket(), Purpose.TRAIN, size=1, extra=0, bound=BOUND)
    second = groups.open(GroupId(2), ticket(), Purpose.TRAIN, size=1, extra=0, bound=BOUND)
    other = groups.open(GroupId(3), ticket("math"), Purpose.TRAIN, size=1, extra=0, bound=BOUND)
    assert groups.short_of_members("maze") is first
    groups.member_started(first.id, TrajectoryId(1))
    assert groups.short_of_members("maze") is second
    groups.member_started(second.id, TrajectoryId(2))
    assert groups.short_of_members("maze") is None
    assert groups.short_of_members("math") is other
    assert groups.short_of_members("unknown") is None


def test_a_group_that_is_short_again_comes_before_later_ones() -> None:
    groups = book(size=1, started=[1])
    groups.open(GroupId(2), ticket(), Purpose.TRAIN, size=1, extra=0, bound=BOUND)
    end(groups, 1, Outcome.ENV_FAILED)
    assert groups.short_of_members("maze") is groups[G]


def test_a_complete_group_wants_nobody_even_if_extra_members_failed() -> None:
    groups = book(size=1, extra=1, started=[1, 2])
    end(groups, 1)
    end(groups, 2, Outcome.ENV_FAILED)
    assert groups[G].complete
    assert groups.short_of_members("maze") is None


# --- ends of members ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", Outcome)
def test_a_member_is_kept_if_it_has_a_result_and_counted_if_it_failed(outcome: Outcome) -> None:
    group = end(book(started=[1]), 1, outcome)
    assert list(group.kept) == ([1] if outcome in (Outcome.COMPLETED, Outcome.TRUNCATED) else [])
    failures = (Outcome.ENV_FAILED, Outcome.ENGINE_FAILED, Outcome.REWARD_FAILED)
    assert group.failed == (1 if outcome in failures else 0)
    assert not group.running


def test_an_outcome_is_a_result_a_failure_or_neither() -> None:
    assert not TRAINABLE & FAILURES
    assert set(Outcome) - TRAINABLE - FAILURES == {Outcome.STALE, Outcome.REDUNDANT, Outcome.CANCELLED}


def test_a_member_leaves_once() -> None:
    groups = book(started=[1])
    end(groups, 1)
    with pytest.raises(InvariantBroken, match="trajectory 1 of group 1 ended twice, or was never started"):
        end(groups, 1)
    with pytest.raises(InvariantBroken):
        end(groups, 99)


def test_a_group_is_complete_with_its_last_result_and_keeps_more_that_come() -> None:
    groups = book(size=2, extra=1, started=[1, 2, 3])
    assert not end(groups, 2).complete
    assert end(groups, 1).complete
    groups.set_ready(G, True)
    group = end(groups, 3)
    assert list(group.kept) == [2, 1, 3], "in the order of their ends"
    assert not group.failed


def test_a_ready_group_starts_nobody() -> None:
    groups = book(size=3, started=[1, 2])
    end(groups, 1)
    assert groups.short_of_members("maze") is groups[G]
    groups.set_ready(G, True)
    assert groups[G].wanted == 0
    assert groups.short_of_members("maze") is None
    groups.set_ready(G, False)
    assert groups.short_of_members("maze") is groups[G]


# --- the minimum ----------------------------------------------------------------------------------------------------


def test_a_group_has_enough_with_its_minimum_of_members_that_are_not_masked() -> None:
    groups = GroupBook()
    groups.open(G, ticket(), Purpose.TRAIN, size=4, minimum=2, bound=BOUND)
    for member in (1, 2, 3):
        groups.member_started(G, TrajectoryId(member))
    end(groups, 1)
    assert not groups[G].enough
    assert end(groups, 2).enough
    groups.masked(G, TrajectoryId(1))
    assert not groups[G].enough, "masked members are not trained"
    assert end(groups, 3).enough


def test_without_a_minimum_only_a_whole_group_is_enough() -> None:
    groups = book(size=2, started=[1, 2])
    assert not end(groups, 1).enough
    assert end(groups, 2).enough


# --- losses ---------------------------------------------------------------------------------------------------------


def aged(started: dict[int, Version], ended: Sequence[int] = ()) -> GroupBook:
    """A group of four with members of these first versions."""
    groups = book(size=4, started=list(started))
    for member, version in started.items():
        groups.first_token(G, TrajectoryId(member), version)
    for member in ended:
        end(groups, member)
    return groups


def test_members_past_the_bound_are_listed_results_first() -> None:
    groups = aged({1: V0, 2: V0, 3: V1}, ended=[2])
    assert groups[G].past_bound(V1) == []
    assert groups[G].past_bound(V2) == [2, 1]
    groups.masked(G, TrajectoryId(1))
    assert groups[G].past_bound(V2) == [2]


def test_lost_members_make_room_for_new_ones_and_age_nobody() -> None:
    groups = aged({1: V0, 2: V0, 3: V1, 4: V1}, ended=[2, 3])
    groups.lose(G, groups[G].past_bound(V2))
    assert list(groups[G].kept) == [3]
    assert list(groups[G].running) == [1, 4], "one that runs leaves when it ends"
    assert groups[G].oldest == V1
    groups.first_token(G, TrajectoryId(1), V0)  # reported again at the end of its turn
    assert groups[G].oldest == V1
    assert groups[G].wanted == 1
    end(groups, 1, Outcome.STALE)
    assert groups[G].wanted == 2
    assert groups.short_of_members("maze") is groups[G]


def test_losses_are_counted_over_all_groups_of_a_prompt() -> None:
    groups = GroupBook()
    group = groups.open(G, ticket(losses=1), Purpose.TRAIN, size=1, bound=BOUND)
    assert group.losses == 1
    groups.lose(G, [])
    assert group.losses == 2
    assert group.requeued(failed=False, stale=False).losses == 2
    assert group.requeued(failed=False, stale=True).losses == 3


def test_a_group_with_a_bound_of_its_own_keeps_its_place_until_it_is_in_overtime() -> None:
    groups = book()
    wider = StalenessBound(4, check_every_turn=True)
    groups.grant(G, wider)
    assert groups[G].own_bound
    assert groups[G].bound == wider
    assert groups.training("maze") == 1
    groups.set_overtime(G)
    groups.set_overtime(G)
    assert groups.training("maze") == 0
    groups.close(G)
    assert groups.training("maze") == 0


def test_a_group_that_is_put_back_has_its_results_and_nobody_running() -> None:
    groups = book(size=2, extra=1, started=[1, 2, 3])
    end(groups, 1)
    end(groups, 2)
    groups.set_ready(G, True)
    taken = groups.close(G)
    assert groups.training("maze") == 0
    groups.put_back(taken)
    assert groups[G].ready
    assert list(groups[G].kept) == [1, 2]
    assert not groups[G].running
    assert groups.training("maze") == 1
    assert groups.short_of_members("maze") is None


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_group_is_hopeless_when_more_than_twice_its_size_and_two_failed(size: int) -> None:
    groups = book(size=size)
    for member in range(2 * size + 2):
        groups.member_started(G, TrajectoryId(member))
        assert not end(groups, member, Outcome.REWARD_FAILED).hopeless
    groups.member_started(G, TrajectoryId(999))
    assert end(groups, 999, Outcome.REWARD_FAILED).hopeless


# --- age ------------------------------------------------------------------------------------------------------------


def test_a_group_is_as_old_as_its_oldest_member_running_or_kept() -> None:
    groups = book(size=3, started=[1, 2, 3])
    assert groups[G].oldest is None
    groups.first_token(G, TrajectoryId(1), V2)
    assert groups[G].oldest == V2
    groups.first_token(G, TrajectoryId(2), V1)
    assert groups[G].oldest == V1
    end(groups, 2)
    assert groups[G].oldest == V1, "kept members age on"
    groups.first_token(G, TrajectoryId(3), V0)
    assert groups[G].oldest == V0
    end(groups, 3, Outcome.ENV_FAILED)
    assert groups[G].oldest == V1, "a member that left does not"
    assert groups[G].oldest_kept == V1


def test_masked_members_do_not_age_the_group() -> None:
    groups = book(size=3, started=[1, 2, 3])
    groups.first_token(G, TrajectoryId(1), V0)
    groups.first_token(G, TrajectoryId(2), V1)
    groups.first_token(G, TrajectoryId(3), V2)
    groups.masked(G, TrajectoryId(1))
    assert groups[G].oldest == V1
    end(groups, 1)
    end(groups, 2)
    assert groups[G].oldest == V1
    groups.masked(G, TrajectoryId(2))
    assert groups[G].oldest == V2
    assert list(groups[G].kept) == [1, 2], "they stay members"
    groups.masked(G, TrajectoryId(99))  # one that left
    assert groups[G].oldest == V2


def test_a_masked_member_stays_masked_when_its_turn_ends() -> None:
    """Its first token is told twice: by the progress of its first turn and at the end of that turn."""
    groups = book(started=[1])
    groups.first_token(G, TrajectoryId(1), V0)
    groups.masked(G, TrajectoryId(1))
    groups.first_token(G, TrajectoryId(1), V0)
    assert groups[G].oldest is None


def test_only_running_members_have_a_first_token() -> None:
    groups = book(started=[1])
    end(groups, 1, Outcome.ENV_FAILED)
    with pytest.raises(InvariantBroken, match="trajectory 1 of group 1"):
        groups.first_token(G, TrajectoryId(1), V0)
    assert not groups[G].running


# --- groups ---------------------------------------------------------------------------------------------------------


def test_a_group_is_opened_once_and_closed_once() -> None:
    groups = book()
    assert G in groups
    assert len(groups.groups()) == 1
    with pytest.raises(InvariantBroken, match="group 1 was opened twice"):
        groups.open(G, ticket(), Purpose.TRAIN, size=1, extra=0, bound=BOUND)
    opened = groups[G]
    assert groups.close(G) is opened
    assert G not in groups
    assert len(groups.groups()) == 0
    assert groups.groups() == []
    with pytest.raises(KeyError):
        groups.close(G)


def test_nobody_is_started_for_a_closed_group() -> None:
    groups = book()
    assert groups.short_of_members("maze") is not None
    groups.close(G)
    assert groups.short_of_members("maze") is None


def test_only_training_groups_count_for_admission() -> None:
    groups = book()
    groups.open(GroupId(2), ticket(), Purpose.TRAIN, size=1, extra=0, bound=BOUND)
    groups.open(GroupId(3), ticket(), Purpose.EVAL, size=1, extra=0, bound=BOUND)
    groups.open(GroupId(4), ticket("math"), Purpose.TRAIN, size=1, extra=0, bound=BOUND)
    assert (groups.training("maze"), groups.training("math"), groups.training("unknown")) == (2, 1, 0)
    groups.close(GroupId(3))
    assert groups.training("maze") == 2
    groups.close(GroupId(2))
    groups.close(G)
    assert (groups.training("maze"), groups.training("math")) == (0, 1)


def test_a_group_knows_what_it_was_opened_for() -> None:
    opened = GroupBook().open(GroupId(9), ticket("math", attempt=2), Purpose.EVAL, size=1, extra=3, bound=BOUND)
    assert (opened.id, opened.task, opened.purpose, opened.size, opened.extra) == (9, "math", Purpose.EVAL, 1, 3)
    assert opened.ticket.attempt == 2


@pytest.mark.parametrize(("failed", "failures"), [(False, 1), (True, 2)])
def test_a_requeued_prompt_keeps_its_history(failed: bool, failures: int) -> None:
    groups = GroupBook()
    before = ticket(attempt=3, failures=1, next_member=10)
    group = groups.open(G, before, Purpose.TRAIN, size=2, extra=0, bound=BOUND)
    groups.member_started(G, TrajectoryId(1))
    assert group.requeued(failed=failed, stale=False) == Ticket(before.number, before.prompt, 4, failures, 11)


def test_a_new_prompt_has_no_history_and_may_fail_a_few_times() -> None:
    assert ticket() == Ticket(7, ticket().prompt, attempt=0, failures=0, next_member=0)
    assert MAX_PROMPT_ATTEMPTS == 3
    with pytest.raises(AttributeError):
        ticket().failures = 1  # type: ignore[misc]


# --- any history ----------------------------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """Groups of two tasks with members that start, age, are masked and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.book = GroupBook()
        self.opened = 0
        self.started = 0
        self.left: set[int] = set()
        """Members that ended, or were running when their group was closed."""
        self.ages: dict[int, Version] = {}
        self.masks: set[int] = set()
        self.numbers: dict[int, list[int]] = {}

    def member(self, data: st.DataObject) -> tuple[OpenGroup, TrajectoryId] | None:
        running = [(group, id) for group in self.book.groups() for id in group.running]
        return data.draw(st.sampled_from(running)) if running else None

    @rule(
        task=st.sampled_from(["maze", "math"]),
        size=st.integers(1, 3),
        extra=st.integers(0, 2),
        purpose=st.sampled_from(Purpose),
    )
    def open(self, task: str, size: int, extra: int, purpose: Purpose) -> None:
        self.opened += 1
        self.book.open(GroupId(self.opened), ticket(task), purpose, size=size, extra=extra, bound=BOUND)

    @rule(task=st.sampled_from(["maze", "math"]))
    def start(self, task: str) -> None:
        group = self.book.short_of_members(task)
        short = [group for group in self.book.groups() if group.task == task and group.wanted and not group.complete]
        assert group is min(short, key=lambda group: group.id, default=None)
        if group is None:
            return
        self.started += 1
        self.numbers.setdefault(group.id, []).append(self.book.member_started(group.id, TrajectoryId(self.started)))

    @precondition(lambda self: self.book.groups())
    @rule(data=st.data(), step=st.integers(0, 3))
    def first_token(self, data: st.DataObject, step: int) -> None:
        found = self.member(data)
        if found is not None and found[1] not in self.ages:
            self.ages[found[1]] = Version(0, step)
            self.book.first_token(found[0].id, found[1], Version(0, step))

    @precondition(lambda self: self.book.groups())
    @rule(data=st.data())
    def mask(self, data: st.DataObject) -> None:
        members = [(group, id) for group in self.book.groups() for id in [*group.running, *group.kept]]
        if members:
            group, id = data.draw(st.sampled_from(members))
            self.masks.add(id)
            self.book.masked(group.id, id)

    @precondition(lambda self: self.book.groups())
    @rule(data=st.data(), outcome=st.sampled_from(Outcome))
    def end(self, data: st.DataObject, outcome: Outcome) -> None:
        found = self.member(data)
        if found is None:
            return
        group, id = found
        failed = group.failed
        self.book.member_ended(group.id, id, outcome)
        self.left.add(id)
        assert (id in group.kept) == (outcome in TRAINABLE)
        assert group.failed == failed + (outcome in FAILURES)
        with pytest.raises(InvariantBroken):
            self.book.member_ended(group.id, id, outcome)

    @precondition(lambda self: self.book.groups())
    @rule(data=st.data())
    def change_readiness(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.book.groups()))
        self.book.set_ready(group.id, not group.ready)

    @precondition(lambda self: self.book.groups())
    @rule(data=st.data(), served=st.integers(3, 5))
    def lose(self, data: st.DataObject, served: int) -> None:
        group = data.draw(st.sampled_from(self.book.groups()))
        members = group.past_bound(Version(0, served))
        running = [id for id in members if id in group.running]
        assert all(served - self.ages[id].step > 1 and id not in self.masks for id in members)
        self.book.lose(group.id, members)
        self.masks.update(running)
        assert not set(members) & set(group.kept)
        assert group.past_bound(Version(0, served)) == []

    @precondition(lambda self: self.book.groups())
    @rule(data=st.data())
    def claim_and_return(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.book.groups()))
        taken = self.book.close(group.id)
        self.left.update(taken.running)
        self.book.put_back(taken)

    @precondition(lambda self: self.book.groups())
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.book.groups()))
        self.left.update(group.running)
        self.book.close(group.id)

    @invariant()
    def every_member_is_in_one_place(self) -> None:
        running = [id for group in self.book.groups() for id in group.running]
        assert len(running) == len(set(running))
        assert set(running) | self.left == set(range(1, self.started + 1))
        assert not set(running) & self.left

    @invariant()
    def groups_keep_to_their_size(self) -> None:
        for group in self.book.groups():
            assert group.complete == (len(group.kept) >= group.size)
            assert 0 <= group.wanted <= group.size + group.extra
            assert not (group.ready and group.wanted)
            assert len(group.running) + len(group.kept) <= group.size + group.extra

    @invariant()
    def the_oldest_unmasked_member_is_the_age(self) -> None:
        for group in self.book.groups():
            members = [*group.running, *group.kept]
            ages = [self.ages[id] for id in members if id in self.ages and id not in self.masks]
            assert group.oldest == min(ages, default=None)

    @invariant()
    def counts_are_those_of_the_groups(self) -> None:
        for task in ("maze", "math"):
            training = [g for g in self.book.groups() if g.task == task and g.purpose is Purpose.TRAIN]
            assert self.book.training(task) == len(training)

    @invariant()
    def member_numbers_are_used_once(self) -> None:
        for numbers in self.numbers.values():
            assert numbers == list(range(len(numbers)))


def test_the_rules_hold_in_any_history() -> None:
    run_state_machine_as_test(
        Histories, settings=settings(max_examples=80, stateful_step_count=40, deadline=None, print_blob=False)
    )


# --- groups whose members are compared ------------------------------------------------------------------------------


def compared(*, size: int = 3, extra: int = 1, minimum: int = 2) -> tuple[GroupBook, OpenGroup]:
    """A group with all of its members started, of which the first two have finished."""
    made = GroupBook()
    group = made.open(G, ticket(), Purpose.TRAIN, size=size, extra=extra, minimum=minimum, bound=BOUND)
    for number in range(size + extra):
        made.member_started(group.id, TrajectoryId(number))
        made.first_token(group.id, TrajectoryId(number), Version(0, number))
    for number in (0, 1):
        made.member_finished(group.id, TrajectoryId(number))
    return made, group


def test_members_that_wait_for_their_group_count_as_results_and_take_their_places() -> None:
    made, group = compared()
    assert (group.complete, group.enough, group.wanted) == (False, True, 0)
    assert group.oldest_kept == Version(0, 0)
    assert group.unfinished == [2, 3]
    made.member_finished(group.id, TrajectoryId(2))
    assert group.complete


def test_a_judged_group_is_fixed_and_those_that_run_do_not_age_it() -> None:
    made, group = compared()
    made.judge(group.id)
    assert (group.judged, group.judgements, group.wanted) == (True, 1, 0)
    assert group.past_bound(Version(0, 4)) == [0, 1]
    with pytest.raises(InvariantBroken):
        made.member_finished(group.id, TrajectoryId(2))
    for number in (2, 3):
        made.member_ended(group.id, TrajectoryId(number), Outcome.REDUNDANT)
    for number in (0, 1):
        made.member_ended(group.id, TrajectoryId(number), Outcome.COMPLETED)
    assert (list(group.kept), list(group.finished), group.wanted) == ([0, 1], [], 0)


def test_a_group_whose_reward_failed_starts_others_and_is_judged_again() -> None:
    made, group = compared(size=2, extra=0)
    made.judge(group.id)
    for number in (0, 1):
        made.member_ended(group.id, TrajectoryId(number), Outcome.REWARD_FAILED)
    assert group.wanted == 0
    made.unjudge(group.id)
    assert (group.wanted, group.failed) == (2, 2)
    assert made.short_of_members("maze") is group
    for number in (4, 5):
        made.member_started(group.id, TrajectoryId(number))
        made.member_finished(group.id, TrajectoryId(number))
    made.judge(group.id)
    assert group.judgements == 2


def test_a_member_that_is_lost_waits_no_more() -> None:
    made, group = compared()
    made.lose(group.id, [TrajectoryId(0)])
    assert list(group.finished) == [1]
    assert not group.enough
    assert group.enough_without(()) is group.enough
    made, group = compared()
    assert not group.enough_without([TrajectoryId(0)])
