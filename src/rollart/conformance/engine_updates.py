"""Engine cases about weights: versions are verified, committed between steps, never older, and invalidate KV."""

import msgspec

from rollart.conformance.case import ConformanceError, NotApplicable, Suite, check
from rollart.conformance.engine_desk import Desk, EngineHarness, Turn, about_stage, about_update
from rollart.conformance.engine_turns import check_length
from rollart.types.messages import KvOnUpdate, Resume, Stage, Staged, StageFailed, Suspend, Update, Updated
from rollart.types.versions import Version

SUITE = Suite[EngineHarness, None]()


@SUITE.case
def tokens_carry_the_version_in_service(harness: EngineHarness) -> None:
    """Every token carries the version it was sampled with: after `Updated`, only the new one."""
    with Desk(harness) as desk:
        for _ in range(3):
            version = desk.serve()
            check_versions(desk.turn(desk.session(), max_tokens=harness.long_turn), version)


@SUITE.case
def staging_changes_nothing(harness: EngineHarness) -> None:
    """A staged version is not served until `Update`."""
    with Desk(harness) as desk:
        first = desk.serve()
        staged = desk.stage()
        check_versions(desk.turn(desk.session()), first)
        desk.update(staged)
        check_versions(desk.turn(desk.session()), staged)


@SUITE.case
def a_missing_version_is_not_staged(harness: EngineHarness) -> None:
    """A version missing from the store is `StageFailed`; the version in service stays, and the next can be staged."""
    with Desk(harness) as desk:
        served = desk.serve()
        missing = msgspec.structs.replace(desk.publish(), version=Version(0, 1_000))
        fails_to_stage(desk, Stage(missing), served)


@SUITE.case
def a_corrupt_version_is_not_staged(harness: EngineHarness) -> None:
    """A flipped byte fails the digest before any token is served with it: `StageFailed`, and the version in service
    stays."""
    if harness.corrupt is None:
        raise NotApplicable("the harness cannot damage a version")
    with Desk(harness) as desk:
        served = desk.serve()
        manifest = desk.publish()
        harness.corrupt(manifest)
        fails_to_stage(desk, Stage(manifest), served)


@SUITE.case
def a_forged_manifest_is_not_staged(harness: EngineHarness) -> None:
    """The digests in `Stage` are verified, not those in the store."""
    with Desk(harness) as desk:
        served = desk.serve()
        manifest = desk.publish()
        forged = msgspec.structs.replace(manifest, digests=tuple("0" * len(digest) for digest in manifest.digests))
        fails_to_stage(desk, Stage(forged), served)


@SUITE.case
def an_unstaged_version_is_not_served(harness: EngineHarness) -> None:
    """`Update` to a version that is not staged is answered by `StageFailed` and changes nothing."""
    with Desk(harness) as desk:
        served = desk.serve()
        refuses_update(desk, desk.publish().version, served)


@SUITE.case
def versions_do_not_go_backwards(harness: EngineHarness) -> None:
    """`Update` to a version older than the one in service is answered by `StageFailed` and changes nothing."""
    with Desk(harness) as desk:
        first = desk.serve()
        second = desk.serve()
        desk.drive.send(Stage(harness.publish(Version(0, 100))))  # so that something else is staged
        desk.drive.until(about_stage(Version(0, 100)))
        refuses_update(desk, first, second)


@SUITE.case
def duplicate_stage_and_update(harness: EngineHarness) -> None:
    """A repeated `Stage` or `Update` is not a failure, and a repeated `Update` is answered again."""
    with Desk(harness) as desk:
        first = desk.serve()
        manifest = desk.publish()
        desk.drive.send(Stage(manifest), Stage(manifest))
        desk.drive.until(about_stage(manifest.version))
        desk.drive.send(Update(manifest.version), Update(manifest.version))
        desk.drive.until(about_update(manifest.version))
        place = desk.drive.mark()
        desk.drive.send(Update(manifest.version))
        desk.drive.until(Updated, after=place)
        failed = [event for event in desk.drive.events if isinstance(event, StageFailed)]
        check(not failed, f"a command may arrive twice, but the second one failed: {failed}")
        check_versions(desk.turn(desk.session()), manifest.version)
        check(first < manifest.version, "the harness publishes increasing versions")


@SUITE.case
def a_turn_in_flight_spans_an_update(harness: EngineHarness) -> None:
    """After an update a turn in flight continues with the new version; its invalid KV is recomputed, or kept."""
    with Desk(harness) as desk:
        served = desk.serve()
        for session, request, version in desk.mid_turn(staging=True):
            desk.update(version)
            turn = desk.finish(session, request)
            if len(turn.versions) > 1:
                check_spanning(desk, turn, served, version)
                return
            served = version
        raise ConformanceError(
            "`Update` acts between two steps, but no turn in flight ever got tokens of both versions"
        )


@SUITE.case
def an_update_commits_while_suspended(harness: EngineHarness) -> None:
    """`Suspend`, `Update`, `Resume`: the update is answered before `Resume`, and turns in flight continue after it."""
    with Desk(harness) as desk:
        served = desk.serve()
        for session, request, version in desk.mid_turn(staging=True):
            desk.drive.send(Suspend())
            desk.update(version)
            desk.drive.send(Resume())
            turn = desk.finish(session, request)
            if len(turn.versions) > 1:
                check_spanning(desk, turn, served, version)
                return
            served = version
        raise ConformanceError("a suspended engine keeps what is in flight, but no turn continued after the update")


@SUITE.case
def only_void_kv_is_recomputed(harness: EngineHarness) -> None:
    """A session that starts after an update recomputes nothing in its first and second turn."""
    with Desk(harness) as desk:
        desk.serve()
        desk.turn(desk.session())
        desk.serve()
        session = desk.session()
        for turn in (desk.turn(session), desk.turn(session)):
            recomputed = turn.usage.recomputed
            check(recomputed == 0, f"KV of the version in service is valid, but {recomputed} tokens were recomputed")


@SUITE.case
def an_idle_session_recomputes_after_an_update(harness: EngineHarness) -> None:
    """A session that was idle during an update recomputes its KV too; once, in its next turn."""
    with Desk(harness) as desk:
        if not desk.info.sessions:
            raise NotApplicable("the engine keeps no sessions")
        desk.serve()
        session = desk.session()
        desk.turn(session)
        version = desk.serve()
        turn = desk.turn(session)
        check_versions(turn, version)
        check_recomputed(desk, turn)
        again = desk.turn(session).usage.recomputed
        check(again == 0, f"KV is recomputed once per update, but {again} tokens were recomputed in a later turn")


@SUITE.case
def generation_continues_while_staging(harness: EngineHarness) -> None:
    """`Stage` waits for no request, and no request waits for it."""
    with Desk(harness) as desk:
        served = desk.serve()
        manifest = desk.publish()
        session = desk.session()
        request = desk.ask(session, max_tokens=harness.long_turn)
        desk.drive.send(Stage(manifest))
        turn = desk.finish(session, request)
        check_length(turn)
        check_versions(turn, served)
        desk.drive.until(about_stage(manifest.version))


@SUITE.case
def a_new_epoch_is_newer(harness: EngineHarness) -> None:
    """Versions are ordered by epoch first: a restarted trainer's version is newer, whatever its step."""
    with Desk(harness) as desk:
        desk.serve()
        desk.serve()
        manifest = harness.publish(Version(1, 1))
        desk.drive.send(Stage(manifest))
        answer = desk.drive.until(about_stage(manifest.version))
        check(isinstance(answer, Staged), f"{manifest.version} is newer than any of epoch 0, but staging gave {answer}")
        desk.update(manifest.version)
        check_versions(desk.turn(desk.session()), manifest.version)


def check_versions(turn: Turn, version: Version) -> None:
    """All tokens of the turn were sampled with this version."""
    check(turn.versions == [version], f"every token carries the version in service, {version}, but got {turn.versions}")


def check_spanning(desk: Desk, turn: Turn, older: Version, newer: Version) -> None:
    check(turn.versions == [older, newer], f"a turn over an update has {older}, then {newer}, but has {turn.versions}")
    check_length(turn)
    check_recomputed(desk, turn)


def check_recomputed(desk: Desk, turn: Turn) -> None:
    """KV invalidated by an update was recomputed, or kept, as the engine declares."""
    recomputed = turn.usage.recomputed
    if desk.info.kv_on_update is KvOnUpdate.RECOMPUTE:
        check(recomputed > 0, "the engine declares `kv_on_update = recompute`, but recomputed nothing")
    else:
        check(recomputed == 0, f"the engine declares `kv_on_update = keep`, but recomputed {recomputed} tokens")


def fails_to_stage(desk: Desk, stage: Stage, served: Version) -> None:
    """The version is not staged and cannot be served; the one in service continues, and a good one is accepted
    afterwards."""
    version = stage.manifest.version
    desk.drive.send(stage)
    answer = desk.drive.until(about_stage(version))
    check(isinstance(answer, StageFailed), f"a version that cannot be verified is `StageFailed`, but gave {answer}")
    check_versions(desk.turn(desk.session()), served)
    refuses_update(desk, version, served)
    newer = desk.serve()
    check_versions(desk.turn(desk.session()), newer)


def refuses_update(desk: Desk, version: Version, served: Version) -> None:
    place = desk.drive.mark()
    desk.drive.send(Update(version))
    answer = desk.drive.until(about_update(version), after=place)
    check(isinstance(answer, StageFailed), f"only a staged, newer version is served, but {version} gave {answer}")
    check_versions(desk.turn(desk.session()), served)
