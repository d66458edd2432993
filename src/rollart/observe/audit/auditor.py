"""The auditor: streams a journal to the checks of the rules.

`CHECKS` is the whole of the coordination: which checks look at an event, in which order. A check is a function of the
state and the event that reports what is wrong and updates its own part of the state. One that returns True skips the
checks after it: the event is about something that does not exist, which is then the only thing wrong with it.
"""

from collections.abc import Callable, Iterable
from typing import Any

from rollart.config.modes import Mode
from rollart.observe.audit import (
    admission,
    affinity,
    conservation,
    elasticity,
    lineage,
    liveness,
    prompts,
    rewards,
    run,
    shares,
    staleness,
    tokens,
    versions,
    waits,
)
from rollart.observe.audit.state import AuditState, Violation
from rollart.types import journal as j

Check = Callable[[AuditState, Any], bool | None]


def audit(events: Iterable[j.JournalEvent]) -> list[Violation]:
    """Every violation, in the order in which it shows."""
    auditor = Auditor()
    for event in events:
        auditor.take(event)
    return auditor.finish()


class Auditor(AuditState, kw_only=True):
    """Takes a journal event by event.

    All state is in fields, so it can be encoded in the middle of a journal, decoded and continued. This is how it is
    carried when a journal is pruned.
    """

    def take(self, event: j.JournalEvent) -> None:
        kind = type(event)
        if self.run is None and kind is not j.RunStarted:
            self.wrong(1, "the journal does not begin with RunStarted")
            self.run = j.RunStarted(event.at, "", Mode.ROLLART.value, 0, 0, {}, 0)
        if self.ended is not None and kind is not j.RunResumed:
            self.wrong(1, f"{kind.__name__} after the end of the run")
        at = event.at
        if at < self.at and kind is not j.RunResumed:
            self.wrong(1, f"{kind.__name__} is dated {self.at - at:g} s before the event it follows")
        self.at = at
        for check in CHECKS.get(kind, ()):
            if check(self, event):
                break
        self.count += 1

    def finish(self) -> list[Violation]:
        """The violations, those of a run that ended with something open included."""
        if self.ended is not None:
            for check in CHECKS_AT_THE_END:
                check(self, self.ended)
        return self.violations


CHECKS: dict[type, tuple[Check, ...]] = {
    # the run
    j.RunStarted: (run.run_started, liveness.run_started, affinity.run_started, elasticity.run_started),
    j.RunResumed: (
        run.run_resumed,
        versions.run_resumed,
        shares.forget_redistributions,
        liveness.run_started,
        affinity.run_started,
        elasticity.run_started,
    ),
    j.RunEnded: (
        run.run_ended,
        liveness.run_ended,
        waits.run_ended,
        run.stopped_by_a_bug,
        affinity.run_ended,
        elasticity.run_ended,
    ),
    j.EpochStarted: (versions.epoch_started, lineage.epoch_started, liveness.epoch_started),
    j.RolledBack: (lineage.rolled_back, shares.rolled_back),
    j.CheckpointSaved: (lineage.checkpoint_saved,),
    j.Snapshot: (lineage.snapshot,),
    j.StallReported: (waits.stall_reported,),
    # workers and weights
    j.WorkerSpawned: (run.worker_spawned, versions.worker_spawned, elasticity.worker_spawned),
    j.WorkerWaits: (elasticity.worker_waits,),
    j.WorkerPlaced: (elasticity.worker_placed,),
    j.RoomChanged: (elasticity.room_changed,),
    j.EnginesChanged: (elasticity.engines_changed,),
    j.EnginesForgiven: (elasticity.engines_forgiven,),
    j.WorkerJoined: (versions.worker_joined, affinity.worker_joined),
    j.WorkerLeaves: (affinity.worker_gone, elasticity.worker_leaves),
    j.WorkerDied: (
        versions.worker_died,
        liveness.worker_died,
        waits.worker_died,
        affinity.worker_gone,
        elasticity.worker_died,
    ),
    j.WorkerLeft: (versions.worker_died, liveness.worker_died, affinity.worker_gone, elasticity.worker_left),
    j.VersionPublished: (versions.version_published,),
    j.EngineUpdated: (versions.engine_updated,),
    j.WeightsSynced: (versions.weights_synced,),
    # groups and trajectories
    j.PromptTaken: (prompts.prompt_taken,),
    j.GroupOpened: (conservation.group_opened, prompts.group_opened, admission.group_opened),
    j.TrajectoryStarted: (conservation.trajectory_started, shares.trajectory_started),
    j.AffinityChanged: (affinity.affinity_changed,),
    j.Placed: (affinity.placed, elasticity.placed, versions.placed),
    j.TurnEnded: (conservation.turn_of_a_running_trajectory, tokens.turn_ended, versions.turn_ended),
    j.RewardFailed: (rewards.reward_failed,),
    j.RewardGiven: (rewards.reward_given, shares.members_compared),
    j.RewardArrived: (rewards.reward_arrived, conservation.reward_arrived),
    j.TrajectoryEnded: (
        conservation.trajectory_ends_once,
        tokens.trajectory_ended,
        versions.trajectory_ended,
        staleness.trajectory_ended,
        conservation.trajectory_ended,
    ),
    j.MembersLost: (conservation.members_lost, staleness.members_lost, admission.members_lost, prompts.members_lost),
    j.MemberReplaced: (conservation.member_replaced,),
    j.GroupEnded: (
        conservation.group_is_open,
        admission.group_ended,
        conservation.group_outcome,
        prompts.group_ended,
        lineage.group_ended,
        conservation.group_ended,
    ),
    j.PoolTime: (elasticity.pool_time,),
    # batches
    j.ShareRedistributed: (shares.share_redistributed,),
    j.BatchClaimed: (
        conservation.claim_made,
        lineage.batch_claimed,
        staleness.served_at_the_claim,
        versions.claim_after_the_sync,
        conservation.claim_takes_groups,
        rewards.batch_claimed,
        admission.batch_claimed,
        shares.batch_claimed,
        staleness.batch_claimed,
    ),
    j.StepTrained: (
        conservation.step_of_an_open_claim,
        versions.step_trained,
        lineage.step_trained,
        liveness.step_trained,
        affinity.step_trained,
        elasticity.step_trained,
        conservation.step_trained,
    ),
    j.ClaimReturned: (
        conservation.return_of_an_open_claim,
        admission.claim_returned,
        conservation.claim_returned,
    ),
}
CHECKS_AT_THE_END: tuple[Check, ...] = (
    conservation.nothing_open,
    prompts.none_open,
    lineage.steps_of_the_run,
    versions.sync_ended,
)
