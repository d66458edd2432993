"""Rule 1, conservation: trajectories, groups and claims end exactly once; only results are trained, each once.

Checked by following each of them from its first event to its last:

- Groups and trajectories are numbered without gaps. A trajectory belongs to an open group.
- A trajectory takes turns and a reward only while it runs, and ends once. A result (completed, truncated) ends with the
  reward that arrived for it; a failure has no reward.
- A claim takes groups that are ready, and of each all results that were not lost. It ends in a step or is returned.
- A group ends as trained exactly if a step trained it, and never while it is claimed.
- When the run has ended, nothing is open.
"""

import math

from rollart.observe.audit.state import AuditState, ClaimState, GroupState, TrajectoryState
from rollart.types import journal as j
from rollart.types.ids import GroupId
from rollart.types.trajectory import FAILURES, TRAINABLE, GroupOutcome, Purpose

# --- groups ---------------------------------------------------------------------------------------------------------


def group_opened(state: AuditState, event: j.GroupOpened) -> None:
    if event.group != state.next_group:
        state.wrong(1, f"group {event.group} was opened, {state.next_group} was next")
    state.next_group = max(state.next_group, event.group + 1)
    if event.group in state.groups:
        state.wrong(1, f"group {event.group} was opened twice")
    state.groups[event.group] = GroupState(event)


def group_is_open(state: AuditState, event: j.GroupEnded) -> bool:
    """Skip the other checks where no such group is open."""
    if event.group in state.groups:
        return False
    state.wrong(1, f"group {event.group} ended twice, or was never opened")
    return True


def group_outcome(state: AuditState, event: j.GroupEnded) -> None:
    group = state.groups[event.group]
    if event.outcome is GroupOutcome.TRAINED:
        if group.trained is None:
            state.wrong(1, f"group {event.group} ended as trained, but no step trained it")
    elif group.trained is not None:
        state.wrong(1, f"group {event.group} was trained and ended as {event.outcome.value}")
    elif group.claim is not None:
        state.wrong(1, f"group {event.group} ended as {event.outcome.value} while it was claimed")


def group_ended(state: AuditState, event: j.GroupEnded) -> None:
    """Forget the group, and its members that have ended."""
    for id in state.groups.pop(event.group).members:
        if id in state.trajectories and state.trajectories[id].ended:
            del state.trajectories[id]


def members_lost(state: AuditState, event: j.MembersLost) -> bool:
    """Remove lost members from the results. Skip the other checks if no such group is open."""
    group = state.groups.get(event.group)
    if group is None or group.claim is not None:
        state.wrong(1, f"group {event.group} lost members, but it is not in the making")
        return True
    for id in event.trajectories:
        if id not in group.members or id in group.lost:
            state.wrong(1, f"group {event.group} lost trajectory {id}, which is not a member, or was lost before")
    group.results = [id for id in group.results if id not in event.trajectories]
    group.lost.extend(event.trajectories)
    return False


def member_replaced(state: AuditState, event: j.MemberReplaced) -> None:
    """A member that is replaced runs, in a group that is in the making."""
    group, member = state.groups.get(event.group), state.trajectories.get(event.trajectory)
    if group is None or group.claim is not None or member is None or member.group != event.group or member.ended:
        state.wrong(1, f"group {event.group} replaced trajectory {event.trajectory}, which is not a running member")
    elif event.trajectory in group.lost or event.trajectory in group.replaced:
        state.wrong(1, f"group {event.group} replaced trajectory {event.trajectory}, which it had given up")
    else:
        group.replaced.append(event.trajectory)


# --- trajectories ---------------------------------------------------------------------------------------------------


def trajectory_started(state: AuditState, event: j.TrajectoryStarted) -> None:
    if event.trajectory != state.next_trajectory:
        state.wrong(1, f"trajectory {event.trajectory} was started, {state.next_trajectory} was next")
    state.next_trajectory = max(state.next_trajectory, event.trajectory + 1)
    group = state.groups.get(event.group)
    if group is None:
        state.wrong(1, f"trajectory {event.trajectory} was started for group {event.group}, which is not open")
        return
    state.trajectories[event.trajectory] = TrajectoryState(event.trajectory, event.group)
    if event.trajectory not in group.members:
        group.members.append(event.trajectory)


def turn_of_a_running_trajectory(state: AuditState, event: j.TurnEnded) -> bool:
    """Skip the other checks of a turn that belongs to nothing."""
    trajectory = state.trajectories.get(event.trajectory)
    if trajectory is not None and not trajectory.ended:
        return False
    state.wrong(1, f"a turn of trajectory {event.trajectory}, which does not run")
    return True


def reward_arrived(state: AuditState, event: j.RewardArrived) -> None:
    trajectory = state.trajectories.get(event.trajectory)
    if trajectory is None or trajectory.ended or trajectory.reward is not None:
        state.wrong(1, f"a reward of trajectory {event.trajectory}, which does not wait for one")
    elif not math.isfinite(event.value):
        state.wrong(1, f"the reward of trajectory {event.trajectory} is {event.value}")
    else:
        trajectory.reward = event.value


def trajectory_ends_once(state: AuditState, event: j.TrajectoryEnded) -> bool:
    """Skip the other checks of a second end."""
    trajectory = state.trajectories.get(event.trajectory)
    if trajectory is None or trajectory.ended:
        state.wrong(1, f"trajectory {event.trajectory} ended twice, or was never started")
        return True
    trajectory.ended = True
    return False


def trajectory_ended(state: AuditState, event: j.TrajectoryEnded) -> None:
    """Results have the reward that arrived, failures have none."""
    trajectory = state.trajectories[event.trajectory]
    trajectory.masked = event.masked
    result = event.outcome in TRAINABLE
    if result and (event.reward is None or event.reward != trajectory.reward):
        state.wrong(1, f"trajectory {event.trajectory} ended with {event.reward}; its reward was {trajectory.reward}")
    if event.outcome in FAILURES and event.reward is not None:
        state.wrong(1, f"trajectory {event.trajectory} is {event.outcome.value} and has a reward")
    group = state.groups.get(trajectory.group)
    if group is None:
        del state.trajectories[event.trajectory]
    elif result:
        if event.trajectory in group.lost:
            state.wrong(1, f"trajectory {event.trajectory} was lost to its group and ended with a result")
        group.results.append(event.trajectory)


# --- claims ---------------------------------------------------------------------------------------------------------


def claim_made(state: AuditState, event: j.BatchClaimed) -> None:
    if event.claim in state.claims:
        state.wrong(1, f"claim {event.claim} was made twice")
    state.claims[event.claim] = ClaimState(event)


def claim_takes_groups(state: AuditState, event: j.BatchClaimed) -> None:
    """The groups were ready, and the batch holds all results of each."""
    took = state.claims[event.claim].took
    for id in event.groups:
        if _take_group(state, event, id):
            took.append(id)
    # In journals without rules, one more than the group needs may have ended before it could be stopped.
    most = state.run.group_size if state.run is not None and state.run.rules is None else None
    if [id for group in took for id in state.groups[group].results[:most]] != list(event.trajectories):
        state.wrong(1, f"claim {event.claim} does not hold exactly the results of its groups")
    masked = set(event.masked)
    for member in event.trajectories:
        if member in state.trajectories and state.trajectories[member].masked and member not in masked:
            state.wrong(1, f"claim {event.claim} trains tokens of trajectory {member}, which are masked")


def _take_group(state: AuditState, event: j.BatchClaimed, id: GroupId) -> bool:
    group = state.groups.get(id)
    if group is None or group.claim is not None or group.trained is not None:
        state.wrong(1, f"claim {event.claim} takes group {id}, which is not ready")
        return False
    if group.opened.purpose is Purpose.EVAL:
        state.wrong(1, f"claim {event.claim} takes evaluation group {id}")
    group.claim = event.claim
    return True


def step_of_an_open_claim(state: AuditState, event: j.StepTrained) -> bool:
    """Skip the other checks of a step without a claim."""
    if event.claim in state.claims:
        return False
    state.wrong(1, f"a step was trained on claim {event.claim}, which is not out")
    return True


def step_trained(state: AuditState, event: j.StepTrained) -> None:
    for id in state.claims.pop(event.claim).claimed.groups:
        group = state.groups.get(id)
        if group is not None:
            group.claim, group.trained = None, event.version.step


def return_of_an_open_claim(state: AuditState, event: j.ClaimReturned) -> bool:
    """Skip the other checks where no such claim is out."""
    if event.claim in state.claims:
        return False
    state.wrong(1, f"claim {event.claim} was returned, but is not out")
    return True


def claim_returned(state: AuditState, event: j.ClaimReturned) -> None:
    for id in state.claims.pop(event.claim).claimed.groups:
        group = state.groups.get(id)
        if group is not None:
            group.claim = None


# --- the end --------------------------------------------------------------------------------------------------------


def nothing_open(state: AuditState, ended: j.RunEnded) -> None:  # noqa: ARG001
    for trajectory in state.running():
        state.wrong(1, f"trajectory {trajectory.id} has no outcome")
    for group in state.groups.values():
        state.wrong(1, f"group {group.id} has no end")
    for claim in state.claims:
        state.wrong(1, f"claim {claim} neither ended in a step nor was returned")
