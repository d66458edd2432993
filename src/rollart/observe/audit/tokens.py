"""Rule 5, tokens: what the turns of a trajectory sampled is what the trajectory holds at its end.

Checked: turns are numbered without gaps; the version runs of a turn cover its tokens exactly; the turns and tokens that
a trajectory ends with are the sums over its turns.
"""

from rollart.observe.audit.state import AuditState
from rollart.types import journal as j


def turn_ended(state: AuditState, event: j.TurnEnded) -> None:
    trajectory = state.trajectories[event.trajectory]
    trajectory.turns += 1
    if event.turn != trajectory.turns:
        state.wrong(5, f"turn {event.turn} of trajectory {event.trajectory} came as number {trajectory.turns}")
    covered = 0
    for _, length in event.versions:
        covered += length
    if covered != event.sampled:
        state.wrong(5, f"turn {event.turn} of trajectory {event.trajectory}: versions do not cover the tokens")
    trajectory.sampled += event.sampled


def trajectory_ended(state: AuditState, event: j.TrajectoryEnded) -> None:
    trajectory = state.trajectories[event.trajectory]
    if event.sampled != trajectory.sampled or event.turns != trajectory.turns:
        state.wrong(5, f"trajectory {event.trajectory} holds {event.sampled} tokens, its turns {trajectory.sampled}")
