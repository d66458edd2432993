"""Resume: end everything that was in flight at an earlier controller.

Its trajectories are lost, so they are cancelled. Its claims are settled once the trainer has reported the step of its
checkpoint; until then groups stay open, because a claimed one may have been trained.
"""

from rollart.control.context import Context
from rollart.types.journal import GroupEnded, TrajectoryEnded
from rollart.types.trajectory import GroupOutcome, Outcome, Purpose

CAUSE = "the controller was lost"


def cancel_in_flight(context: Context) -> None:
    """End the trajectories of an earlier controller."""
    for entry in context.lineage.state().trajectories:
        context.record(
            TrajectoryEnded(
                context.now(),
                entry.trajectory,
                Outcome.CANCELLED,
                entry.turns,
                entry.sampled,
                first=entry.first,
                last=entry.last,
                cause=CAUSE,
            )
        )


def end_cancelled_groups(context: Context) -> None:
    """End the groups of an earlier controller, once its claims are settled and before this one opens any."""
    for entry in context.lineage.state().groups:
        if entry.trained_step is not None:
            context.record(GroupEnded(context.now(), entry.group, GroupOutcome.TRAINED, requeued=False))
        else:
            requeued = entry.purpose is Purpose.TRAIN
            context.record(GroupEnded(context.now(), entry.group, GroupOutcome.CANCELLED, requeued, CAUSE))
