"""Rule 4, versions: published before served, only growing; every token is of a version that its engine had.

Checked: epochs and published versions grow; an engine takes only published versions and never an older one; one sync
ends before the next begins and before a claim, and leaves all live engines at its version; a trajectory goes to a live
engine that is not older than its last token; the versions of its tokens grow, and each was served by one of the engines
that it had been placed on. Every sync drops state that can no longer be referenced.
"""

from rollart.observe.audit.state import AuditState, EngineState, TrajectoryState
from rollart.types import journal as j
from rollart.types.failures import StopReason
from rollart.types.ids import WorkerId
from rollart.types.messages import Role
from rollart.types.versions import Version

# --- engines and syncs ----------------------------------------------------------------------------------------------


def run_resumed(state: AuditState, event: j.RunResumed) -> None:  # noqa: ARG001
    for engine in state.engines.values():
        engine.dead = True
    state.served = state.synced = state.syncing = None


def worker_spawned(state: AuditState, event: j.WorkerSpawned) -> None:
    if event.role is Role.ENGINE:
        state.engines[event.worker] = EngineState()


def worker_joined(state: AuditState, event: j.WorkerJoined) -> None:
    engine = state.engines.get(event.worker)
    if engine is not None:
        engine.joined = True


def worker_died(state: AuditState, event: j.WorkerDied | j.WorkerLeft) -> None:
    engine = state.engines.get(event.worker)
    if engine is not None:
        engine.dead = True


def epoch_started(state: AuditState, event: j.EpochStarted) -> None:
    if event.epoch <= state.epoch:
        state.wrong(4, f"epoch {event.epoch} was started after {state.epoch}")
    state.epoch = event.epoch


def version_published(state: AuditState, event: j.VersionPublished) -> None:
    version = event.version
    if state.newest is not None and version <= state.newest:
        state.wrong(4, f"{version} was published after {state.newest}")
    if version.epoch != state.epoch:
        state.wrong(4, f"{version} was published in epoch {state.epoch}, which is not durable under that number")
    state.published.append(version)
    state.newest = version


def engine_updated(state: AuditState, event: j.EngineUpdated) -> None:
    engine = _live_engine(state, event.worker, f"updated to {event.version}")
    if event.version not in state.published:
        state.wrong(
            4, f"{event.worker} serves {event.version}, which was never published, or is older than {state.synced}"
        )
    _follow_sync(state, event.version)
    if engine is None:
        return
    if engine.version is not None and event.version < engine.version:
        state.wrong(4, f"{event.worker} went back from {engine.version} to {event.version}")
    engine.version = event.version
    if event.version not in engine.had:
        engine.had.append(event.version)
    if state.served is None or event.version > state.served:
        state.served = event.version


def _follow_sync(state: AuditState, version: Version) -> None:
    """Outside a sync, engines take the version of the run; a newer one is the version of a sync."""
    if state.synced is None:
        state.synced = version
    elif version > state.synced:
        if state.syncing is not None and version != state.syncing:
            state.wrong(4, f"engines take {version}, but the sync to {state.syncing} did not end")
        state.syncing = version


def weights_synced(state: AuditState, event: j.WeightsSynced) -> None:
    if state.served is not None and event.version < state.served:
        state.wrong(4, f"the run went from {state.served} to {event.version}")
    for worker, engine in state.engines.items():
        if engine.version is not None and not engine.dead and engine.version != event.version:
            state.wrong(4, f"{worker} serves {engine.version} after a sync to {event.version}")
    state.served = state.synced = event.version
    state.syncing = None
    forget_versions(state)


def forget_versions(state: AuditState) -> None:
    """Drop versions that future tokens cannot carry, and dead engines without running trajectories."""
    state.published = [version for version in state.published if state.synced is None or version >= state.synced]
    running = state.running()
    oldest = min((t.since for t in running if t.since is not None), default=state.synced)
    needed = {engine for trajectory in running for engine in trajectory.engines}
    state.engines = {id: e for id, e in state.engines.items() if not e.dead or id in needed}
    for engine in state.engines.values():
        engine.had = [had for had in engine.had if had == engine.version or oldest is None or had >= oldest]


def sync_ended(state: AuditState, ended: j.RunEnded) -> None:
    if state.syncing is not None and ended.stop is StopReason.DONE:
        state.wrong(4, f"the sync to {state.syncing} did not end")


def _live_engine(state: AuditState, worker: WorkerId, what: str) -> EngineState | None:
    engine = state.engines.get(worker)
    if engine is None or engine.dead or not engine.joined:
        state.wrong(4, f"{worker} {what}, but it is dead, or never joined")
    return engine


# --- trajectories and batches ---------------------------------------------------------------------------------------


def placed(state: AuditState, event: j.Placed) -> None:
    trajectory = state.trajectories.get(event.trajectory)
    engine = _live_engine(state, event.engine, f"got trajectory {event.trajectory}")
    if trajectory is None or engine is None:
        return
    if engine.version is None:
        state.wrong(4, f"trajectory {event.trajectory} was sent to {event.engine}, which has no weights")
    elif trajectory.last is not None and engine.version < trajectory.last:
        state.wrong(
            4, f"trajectory {event.trajectory} at {trajectory.last} moved to {event.engine} at {engine.version}"
        )
    trajectory.engine = event.engine
    trajectory.engines.append(event.engine)
    if engine.version is not None:
        trajectory.since = min(engine.version, trajectory.since or engine.version)


def turn_ended(state: AuditState, event: j.TurnEnded) -> None:
    trajectory = state.trajectories[event.trajectory]
    expected = trajectory.engine == event.engine
    if not expected:
        state.wrong(4, f"trajectory {event.trajectory} was placed on {trajectory.engine}, {event.engine} answered")
    for version, _ in event.versions:
        if trajectory.last is not None and version < trajectory.last:
            state.wrong(4, f"trajectory {trajectory.id}: {version} after {trajectory.last}")
        if not _was_served(state, trajectory, version):
            state.wrong(4, f"trajectory {trajectory.id} has tokens of {version}, which none of its engines served")
        trajectory.last = version
        if trajectory.first is None:
            trajectory.first = version
    engine = state.engines.get(event.engine)
    if engine is not None and expected:
        trajectory.engines, trajectory.since = [event.engine], engine.version


def _was_served(state: AuditState, trajectory: TrajectoryState, version: Version) -> bool:
    for worker in trajectory.engines:
        engine = state.engines.get(worker)
        if engine is not None and version in engine.had:
            return True
    return False


def trajectory_ended(state: AuditState, event: j.TrajectoryEnded) -> None:
    trajectory = state.trajectories[event.trajectory]
    if (event.first, event.last) != (trajectory.first, trajectory.last):
        state.wrong(4, f"trajectory {event.trajectory} says versions {event.first}–{event.last}, its turns differ")


def claim_after_the_sync(state: AuditState, event: j.BatchClaimed) -> None:
    if state.syncing is not None:
        state.wrong(4, f"claim {event.claim} was made before the sync to {state.syncing} ended")


def step_trained(state: AuditState, event: j.StepTrained) -> None:
    claimed = state.claims[event.claim].claimed
    if event.version.step != claimed.step + 1 or event.version.epoch != state.epoch:
        state.wrong(4, f"claim {event.claim} of step {claimed.step} became {event.version} in epoch {state.epoch}")
