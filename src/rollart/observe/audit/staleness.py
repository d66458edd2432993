"""Rule 2, staleness: at the claim, 0 ≤ served − first ≤ α for everything whose tokens are trained.

α is that of the task, or of the group if its prompt was lost so often that it got a bound of its own.

`served` is the newest version in service, `first` the version of a trajectory's first sampled token, both derived from
`EngineUpdated` and `TurnEnded`. A group is as stale as its oldest member; masked members do not count. Checked at every
claim: the version in service and the staleness that it states, the bound α (in modes that check it at every turn), and
that no token is of a version that a roll-back made void. Members that a group gives up are past the bound, and only
those.
"""

from rollart.config.modes import MODES, Mode
from rollart.observe.audit.state import AuditState, GroupState
from rollart.types import journal as j
from rollart.types.trajectory import Outcome


def alpha_of(run: j.RunStarted, group: GroupState) -> int:
    """The staleness bound of a group."""
    if group.alpha is not None:
        return group.alpha
    return run.alpha if run.rules is None else run.rules.alpha.get(group.opened.task, run.alpha)


def members_lost(state: AuditState, event: j.MembersLost) -> None:
    """Check that members given up are past the bound. The first token of a turn in flight is unknown."""
    run, group, served = state.run, state.groups[event.group], state.served
    for id in event.trajectories:
        member = state.trajectories.get(id)
        if run is None or served is None or member is None or member.first is None:
            continue
        if served.step - member.first.step <= alpha_of(run, group):
            state.wrong(2, f"group {group.id} gave up trajectory {id} of {member.first} at {served}: within the bound")


def trajectory_ended(state: AuditState, event: j.TrajectoryEnded) -> None:
    """A member past the bound of the last sync is a loss of its group, unless it was replaced before, or the group has
    ended with it."""
    trajectory = state.trajectories[event.trajectory]
    run, group, synced = state.run, state.groups.get(trajectory.group), state.synced
    if event.outcome is not Outcome.STALE or run is None or run.rules is None or group is None or synced is None:
        return
    past = trajectory.first is not None and synced.step - trajectory.first.step > alpha_of(run, group)
    if past and event.trajectory not in group.lost and event.trajectory not in group.replaced:
        state.wrong(2, f"trajectory {event.trajectory} is past the bound, but group {group.id} did not lose it")


def served_at_the_claim(state: AuditState, event: j.BatchClaimed) -> None:
    if state.served is not None and event.served != state.served:
        state.wrong(2, f"claim {event.claim} says that {event.served} is served; it is {state.served}")


def batch_claimed(state: AuditState, event: j.BatchClaimed) -> None:
    run = state.run
    if run is None:
        return
    bounded = MODES[Mode(run.mode)].check_every_turn
    claimed, masked = set(event.trajectories), set(event.masked)
    for index, group in enumerate(state.groups_taken(event.claim)):
        members = [state.trajectories[id] for id in group.members if id in claimed and id in state.trajectories]
        for member in members:
            if member.last is not None and member.last.step > event.served.step:
                state.wrong(
                    2, f"claim {event.claim}: trajectory {member.id} has tokens of {member.last}, which is void"
                )
        firsts = [member.first for member in members if member.id not in masked and member.first is not None]
        if not firsts:
            state.wrong(2, f"claim {event.claim}: group {group.id} has nothing to train")
            continue
        oldest = min(firsts)
        staleness = event.served.step - oldest.step
        if staleness < 0 or oldest.epoch > event.served.epoch:
            state.wrong(2, f"claim {event.claim}: group {group.id} of {oldest} is newer than {event.served}")
        elif bounded and staleness > alpha_of(run, group):
            state.wrong(
                2, f"claim {event.claim}: group {group.id} is {staleness} steps stale, α is {alpha_of(run, group)}"
            )
        if index < len(event.staleness) and event.staleness[index] != staleness:
            state.wrong(2, f"claim {event.claim}: group {group.id} is {staleness} stale, {event.staleness[index]} said")
