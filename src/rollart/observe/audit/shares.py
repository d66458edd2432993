"""Rule 3, shares: a batch holds the configured number of groups per task, each with its promised members.

Checked at every claim: the number of groups by task against `RunStarted.groups_per_batch` as changed by any
`ShareRedistributed` of that step. A redistribution gives away as many groups as others take over. It is void after a
roll-back or a resume.

Checked for each group, at every claim and every start of a member (`GroupRules`):

- It has its full size, or it is at its last chance: the next update would put its oldest member past the bound. Where
  a reward compares its members, this is checked when they are compared: they are fixed from then on, and lost members
  are not replaced.
- Its members whose tokens are trained are no fewer than the minimum.
- It never has more members, running or with a result, than its size and the limit of extra ones.
"""

from collections import Counter

from rollart.config.modes import MODES, Mode
from rollart.observe.audit import staleness
from rollart.observe.audit.state import AuditState, GroupState, TrajectoryState
from rollart.types import journal as j
from rollart.types.trajectory import Purpose
from rollart.types.versions import Version


def share_redistributed(state: AuditState, event: j.ShareRedistributed) -> None:
    if sum(event.missing.values()) != sum(event.filled_by.values()):
        state.wrong(3, f"step {event.step}: {event.missing} was given up, {event.filled_by} was taken over")
    state.redistributed.setdefault(event.step, []).append(event)


def batch_claimed(state: AuditState, event: j.BatchClaimed) -> None:
    run = state.run
    if run is None:
        return
    wanted = Counter(run.groups_per_batch)
    for change in state.redistributed.pop(event.step, []):
        wanted.subtract(change.missing)
        wanted.update(change.filled_by)
    got = Counter(group.opened.task for group in state.groups_taken(event.claim))
    if {task: count for task, count in wanted.items() if count} != dict(got):
        state.wrong(3, f"claim {event.claim} holds {dict(got)} groups instead of {dict(wanted)}")
    if run.rules is not None:
        for group in state.groups_taken(event.claim):
            _promises(state, event, run, run.rules, group)
    elif len(event.trajectories) != len(event.groups) * run.group_size:
        state.wrong(3, f"claim {event.claim} holds {len(event.trajectories)} trajectories: groups are not whole")


def _promises(
    state: AuditState, event: j.BatchClaimed, run: j.RunStarted, rules: j.GroupRules, group: GroupState
) -> None:
    masked = set(event.masked)
    trained = [state.trajectories[id] for id in group.results if id not in masked]
    if len(trained) < rules.min_size:
        state.wrong(3, f"claim {event.claim} trains {len(trained)} members of group {group.id}: below the minimum")
    if len(group.results) < run.group_size and not group.judged and not _last_chance(run, group, trained, event.served):
        state.wrong(3, f"claim {event.claim} takes group {group.id} short of members before its last chance")


def _last_chance(run: j.RunStarted, group: GroupState, members: list[TrajectoryState], served: Version) -> bool:
    """Whether the next update would put one of these members past the bound."""
    oldest = min((member.first for member in members if member.first is not None), default=None)
    mode = MODES[Mode(run.mode)]
    enforced = mode.check_every_turn and mode.interrupt
    return enforced and oldest is not None and served.step - oldest.step >= staleness.alpha_of(run, group)


def members_compared(state: AuditState, event: j.RewardGiven) -> None:
    """Members are compared when the group has its size, or at its last chance."""
    run, first = state.run, state.trajectories.get(event.trajectories[0]) if event.trajectories else None
    group = None if first is None else state.groups.get(first.group)
    if run is None or group is None or state.served is None or event.name not in group.judged:
        return
    members = [*event.trajectories, *group.lost]
    if group.opened.purpose is Purpose.EVAL or group.rolled_back or len(members) >= run.group_size:
        return
    known = [state.trajectories[id] for id in members if id in state.trajectories]
    if not _last_chance(run, group, known, state.served):
        state.wrong(3, f"{event.name} compares {len(members)} members of group {group.id} before its last chance")


def rolled_back(state: AuditState, event: j.RolledBack) -> None:
    """A roll-back makes groups younger: a last chance may no longer be one."""
    forget_redistributions(state, event)
    for group in state.groups.values():
        group.rolled_back = True


def trajectory_started(state: AuditState, event: j.TrajectoryStarted) -> None:
    run, group = state.run, state.groups.get(event.group)
    if run is None or run.rules is None or group is None:
        return
    running = sum(not state.trajectories[id].ended for id in group.members if id in state.trajectories)
    size = run.group_size + run.rules.max_extra if group.opened.purpose is Purpose.TRAIN else 1
    if running + len(group.results) > size:
        state.wrong(3, f"group {group.id} has {running + len(group.results)} members, at most {size} may be")


def forget_redistributions(state: AuditState, event: j.RunResumed | j.RolledBack) -> None:  # noqa: ARG001
    """They were for a batch that was never claimed."""
    state.redistributed.clear()
