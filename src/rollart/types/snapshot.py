"""The durable state of a run: what a controller needs to continue where another one stopped."""

from typing import Any

import msgspec

from rollart.types.ids import ClaimId, GroupId, TrajectoryId
from rollart.types.trajectory import Purpose, Ticket
from rollart.types.versions import Version


class OpenGroupState(msgspec.Struct, frozen=True):
    """A group in flight, ready or claimed. `ticket` is None for an evaluation, whose prompt is not requeued."""

    group: GroupId
    purpose: Purpose
    ticket: Ticket | None
    next_member: int
    trained_step: int | None = None
    """Step that its claim ended in, while its own end is not written yet."""
    lost: int = 0
    """Updates at which it lost members to the staleness bound."""


class OpenTrajectory(msgspec.Struct):
    """A trajectory without an outcome, and its sampled tokens so far."""

    trajectory: TrajectoryId
    turns: int = 0
    sampled: int = 0
    first: Version | None = None
    last: Version | None = None


class OpenClaim(msgspec.Struct, frozen=True):
    """A claim that neither ended in a step nor was returned."""

    claim: ClaimId
    step: int
    groups: tuple[GroupId, ...]


class TrainedGroup(msgspec.Struct, frozen=True):
    """A group trained in the step that led to `step`; a roll-back to before it requeues `ticket`."""

    group: GroupId
    step: int
    ticket: Ticket


class RunState(msgspec.Struct, frozen=True):
    """State of a run; its size is bounded by what is in flight plus what was trained since the last checkpoint."""

    epoch: int = -1
    """Epoch of the last trainer; -1 before the first."""
    step: int = 0
    """Steps trained in the surviving lineage."""
    next_group: int = 0
    next_trajectory: int = 0
    next_ticket: int = 0
    next_claim: int = 0
    cursors: dict[str, dict[str, Any]] = {}
    waiting: tuple[Ticket, ...] = ()
    groups: tuple[OpenGroupState, ...] = ()
    trajectories: tuple[OpenTrajectory, ...] = ()
    claims: tuple[OpenClaim, ...] = ()
    trained: tuple[TrainedGroup, ...] = ()
