"""Weight sync by example: publication, staging, and syncs of all engines together or one by one."""

import pytest
from sync_parts import V0, V1, V2, A, B, C, all_staged, manifest, serving, stage

from rollart.policy.sync import SyncBook
from rollart.types.errors import InvariantBroken
from rollart.types.messages import Resume, Suspend, Update
from rollart.types.versions import Version

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
    assert not book.in_service(A), "only once it reports so"
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
    assert book.stage_failed(A, V1) == [], "it is superseded"
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
    assert book.updated(A, V1) == [], "no update was requested"
    assert book.engine_left(B) == []
    assert not book.in_service(B)
    assert (book.served, book.ready()) == (V0, True)


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
