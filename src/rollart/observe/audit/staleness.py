"""Rule 2, staleness: at the claim, 0 ≤ served − first ≤ α for everything whose tokens are trained.

`served` is the newest version in service, `first` the version of a trajectory's first sampled token, both derived from
`EngineUpdated` and `TurnEnded`. A group is as stale as its oldest member; masked members do not count. Checked at every
claim: the version in service and the staleness that it states, the bound α (in modes that check it at every turn), and
that no token is of a version that a roll-back made void.
"""

from rollart.config.modes import MODES, Mode
from rollart.observe.audit.state import AuditState
from rollart.types import journal as j


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
        elif bounded and staleness > run.alpha:
            state.wrong(2, f"claim {event.claim}: group {group.id} is {staleness} steps stale, α is {run.alpha}")
        if index < len(event.staleness) and event.staleness[index] != staleness:
            state.wrong(2, f"claim {event.claim}: group {group.id} is {staleness} stale, {event.staleness[index]} said")
