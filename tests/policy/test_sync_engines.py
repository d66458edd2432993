"""Weight sync by example: engines that fail, and engines that join late."""

import pytest
from sync_parts import V0, V1, V2, A, B, all_staged, manifest, serving, stage

from rollart.policy.sync import STAGE_ATTEMPTS
from rollart.types.messages import Resume, Suspend, Update

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


# --- engines that join late -----------------------------------------------------------------------------------------


def test_a_late_engine_serves_the_version_of_the_run_first_and_stages_the_newest_then() -> None:
    book = all_staged(A)
    assert book.engine_joined(B) == [(B, [stage(V0)])]
    assert book.staged(B, V0) == [(B, [Update(V0)])]
    assert book.ready(), "a sync does not wait for an engine that is not in service"
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
