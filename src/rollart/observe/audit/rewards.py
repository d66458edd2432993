"""Rule 1, rewards: each is counted once, and defaults are marked.

Checked for tasks whose rewards the journal lists (`RunStarted.rewards`):

- Every reward is given once per trajectory, while it waits for it, and the reward that arrives is their weighted sum.
- A reward that compares members is given to several members of one group at once; a batch trains only members that
  were compared with each other.
- A default is given where its reward failed, is marked as such, and nowhere else.
"""

import math

from rollart.observe.audit.state import AuditState, TrajectoryState
from rollart.types import journal as j
from rollart.types.ids import TrajectoryId
from rollart.types.rewards import RewardRule, total


def reward_failed(state: AuditState, event: j.RewardFailed) -> None:
    for id in event.trajectories:
        trajectory = state.trajectories.get(id)
        if trajectory is None or trajectory.ended or trajectory.reward is not None:
            state.wrong(1, f"reward {event.name} of trajectory {id} failed, which does not wait for one")
        elif event.name in trajectory.failed or event.name in trajectory.given:
            state.wrong(1, f"reward {event.name} of trajectory {id} failed after it was settled")
        else:
            trajectory.failed.append(event.name)


def reward_given(state: AuditState, event: j.RewardGiven) -> None:
    if len(event.values) != len(event.trajectories):
        state.wrong(1, f"reward {event.name} has {len(event.values)} values for {len(event.trajectories)} trajectories")
        return
    for id, value in zip(event.trajectories, event.values, strict=True):
        trajectory = state.trajectories.get(id)
        if trajectory is None or trajectory.ended or trajectory.reward is not None:
            state.wrong(1, f"reward {event.name} of trajectory {id}, which does not wait for one")
        elif event.name in trajectory.given:
            state.wrong(1, f"reward {event.name} of trajectory {id} was given twice")
        else:
            trajectory.given[event.name] = value
            _check_default(state, event, trajectory, value)
    _check_group(state, event)


def _check_default(state: AuditState, event: j.RewardGiven, trajectory: TrajectoryState, value: float) -> None:
    if not math.isfinite(value):
        state.wrong(1, f"reward {event.name} of trajectory {trajectory.id} is {value}")
    failed = event.name in trajectory.failed
    if event.defaulted != failed:
        done = "failed and was given unmarked" if failed else "did not fail and is marked as a default"
        state.wrong(1, f"reward {event.name} of trajectory {trajectory.id} {done}")
    rule = _rule(state, trajectory, event.name)
    if event.defaulted and (rule is None or rule.default != value):
        state.wrong(
            1, f"reward {event.name} of trajectory {trajectory.id} is a default of {value}, which is not its own"
        )


def _check_group(state: AuditState, event: j.RewardGiven) -> None:
    """Several trajectories get a reward at once if they were compared, and only then."""
    known = [state.trajectories[id] for id in event.trajectories if id in state.trajectories]
    groups = list(dict.fromkeys(trajectory.group for trajectory in known))
    if len(groups) != 1 or groups[0] not in state.groups:
        state.wrong(1, f"reward {event.name} is of {len(groups)} groups at once, or of one that is not open")
        return
    rule = _rule(state, known[0], event.name)
    if rule is not None and rule.group:
        state.groups[groups[0]].judged[event.name] = list(event.trajectories)
    elif len(event.trajectories) > 1:
        state.wrong(1, f"reward {event.name} was given to {len(event.trajectories)} trajectories, but compares none")


def reward_arrived(state: AuditState, event: j.RewardArrived) -> None:
    trajectory = state.trajectories.get(event.trajectory)
    rules = () if trajectory is None else _rules(state, trajectory)
    if trajectory is None or not rules:
        return
    missing = [rule.name for rule in rules if rule.name not in trajectory.given]
    if missing:
        state.wrong(1, f"the reward of trajectory {event.trajectory} arrived without {', '.join(missing)}")
    elif total(rules, trajectory.given) != event.value:
        state.wrong(
            1,
            f"the reward of trajectory {event.trajectory} is {event.value}, its parts add up to "
            f"{total(rules, trajectory.given)}",
        )


def batch_claimed(state: AuditState, event: j.BatchClaimed) -> None:
    """Check that members trained together were compared with each other."""
    for group in state.groups_taken(event.claim):
        for name, judged in group.judged.items():
            strangers = [id for id in group.results if id not in judged]
            if strangers:
                state.wrong(1, f"claim {event.claim} trains {_named(strangers)}, whose {name} is not of its group")


def _named(ids: list[TrajectoryId]) -> str:
    return "trajectories " + ", ".join(map(str, ids))


def _rules(state: AuditState, trajectory: TrajectoryState) -> tuple[RewardRule, ...]:
    group = state.groups.get(trajectory.group)
    if group is None or state.run is None:
        return ()
    return state.run.rewards.get(group.opened.task, ())


def _rule(state: AuditState, trajectory: TrajectoryState, name: str) -> RewardRule | None:
    return next((rule for rule in _rules(state, trajectory) if rule.name == name), None)
