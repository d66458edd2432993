"""Lineage of a run, folded from its journal: which prompts are settled and which must be processed again.

    taken ─► waiting ─► in flight ─┬─ trained at step s ── a checkpoint of s or later ──► settled
                ▲                  ├─ queued again ─► waiting
                │                  └─ spent (filtered, or set aside after too many failures)
                └── a roll-back to a step before s ──┘

A step belongs to the surviving lineage only once a checkpoint holds it; until then the fold remembers which prompts it
consumed. The controller folds its own events as it writes them, and a resume folds the same events from the last
snapshot on, so a new controller has exactly the state of the old one.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from rollart.types import journal as j
from rollart.types.errors import InvariantBroken
from rollart.types.snapshot import OpenClaim, OpenGroupState, OpenTrajectory, RunState, TrainedGroup
from rollart.types.trajectory import GroupOutcome, Purpose, Ticket


class Lineage:
    """Fold described in the module docstring. `apply` takes every event of the run, in order."""

    def __init__(self, state: RunState | None = None) -> None:
        state = state or RunState()
        self.epoch = state.epoch
        self.step = state.step
        self._next_group = state.next_group
        self._next_trajectory = state.next_trajectory
        self._next_ticket = state.next_ticket
        self._next_claim = state.next_claim
        self._cursors = dict(state.cursors)
        self._waiting: dict[int, Ticket] = {ticket.number: ticket for ticket in state.waiting}
        self._groups = {group.group: group for group in state.groups}
        self._trajectories = {entry.trajectory: copy.copy(entry) for entry in state.trajectories}
        self._claims = {claim.claim: claim for claim in state.claims}
        self._trained = {entry.group: entry for entry in state.trained}
        self._handlers: dict[type, Callable[[Any], None]] = {
            j.PromptTaken: self._prompt_taken,
            j.GroupOpened: self._group_opened,
            j.MembersLost: self._members_lost,
            j.GroupEnded: self._group_ended,
            j.TrajectoryStarted: self._trajectory_started,
            j.TurnEnded: self._turn_ended,
            j.TrajectoryEnded: self._trajectory_ended,
            j.BatchClaimed: self._batch_claimed,
            j.StepTrained: self._step_trained,
            j.ClaimReturned: self._claim_returned,
            j.EpochStarted: self._epoch_started,
            j.CheckpointSaved: self._checkpoint_saved,
            j.RolledBack: self._rolled_back,
        }

    def apply(self, event: j.JournalEvent) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def state(self) -> RunState:
        """The state as an immutable value."""
        return RunState(
            epoch=self.epoch,
            step=self.step,
            next_group=self._next_group,
            next_trajectory=self._next_trajectory,
            next_ticket=self._next_ticket,
            next_claim=self._next_claim,
            cursors=dict(self._cursors),
            waiting=tuple(self._waiting.values()),
            groups=tuple(self._groups.values()),
            # Copied because trajectories change in place: theirs is by far the most frequent event.
            trajectories=tuple(map(copy.copy, self._trajectories.values())),
            claims=tuple(self._claims.values()),
            trained=tuple(self._trained.values()),
        )

    def trained_after(self, step: int) -> list[TrainedGroup]:
        """Groups that a roll-back to `step` voids, in the order in which they were trained."""
        return [entry for entry in self._trained.values() if entry.step > step]

    def _prompt_taken(self, event: j.PromptTaken) -> None:
        self._next_ticket = event.ticket + 1
        self._waiting[event.ticket] = Ticket(event.ticket, event.prompt)
        self._cursors[event.prompt.task] = event.cursor

    def _group_opened(self, event: j.GroupOpened) -> None:
        self._next_group = event.group + 1
        ticket = None
        if event.purpose is Purpose.TRAIN:
            ticket = self._waiting.pop(event.ticket, None)
            if ticket is None:
                raise InvariantBroken(f"group {event.group} was opened for ticket {event.ticket}, which does not wait")
        next_member = 0 if ticket is None else ticket.next_member
        self._groups[event.group] = OpenGroupState(event.group, event.purpose, ticket, next_member)

    def _members_lost(self, event: j.MembersLost) -> None:
        group = self._groups[event.group]
        self._groups[event.group] = replace(group, lost=group.lost + 1)

    def _group_ended(self, event: j.GroupEnded) -> None:
        group = self._groups.pop(event.group)
        if group.ticket is None:
            return
        again = group.ticket.again(
            group.next_member,
            failed=event.outcome is GroupOutcome.FAILED,
            lost=group.lost + (event.outcome is GroupOutcome.STALE),
        )
        if event.outcome is GroupOutcome.TRAINED:
            if group.trained_step is None:
                raise InvariantBroken(f"group {event.group} ended as trained without a step")
            self._trained[event.group] = TrainedGroup(event.group, group.trained_step, again)
        elif event.requeued:
            self._waiting[again.number] = again

    def _trajectory_started(self, event: j.TrajectoryStarted) -> None:
        self._next_trajectory = event.trajectory + 1
        self._trajectories[event.trajectory] = OpenTrajectory(event.trajectory)
        group = self._groups[event.group]
        self._groups[event.group] = replace(group, next_member=event.member + 1)

    def _turn_ended(self, event: j.TurnEnded) -> None:
        entry = self._trajectories[event.trajectory]
        entry.turns = event.turn
        entry.sampled += event.sampled
        versions = event.versions
        if versions:
            if entry.first is None:
                entry.first = versions[0][0]
            entry.last = versions[-1][0]

    def _trajectory_ended(self, event: j.TrajectoryEnded) -> None:
        del self._trajectories[event.trajectory]

    def _batch_claimed(self, event: j.BatchClaimed) -> None:
        self._next_claim = event.claim + 1
        self._claims[event.claim] = OpenClaim(event.claim, event.step, event.groups)

    def _step_trained(self, event: j.StepTrained) -> None:
        claim = self._claims.pop(event.claim)
        self.step = event.version.step
        for group in claim.groups:
            self._groups[group] = replace(self._groups[group], trained_step=event.version.step)

    def _claim_returned(self, event: j.ClaimReturned) -> None:
        del self._claims[event.claim]

    def _epoch_started(self, event: j.EpochStarted) -> None:
        if event.epoch <= self.epoch:
            raise InvariantBroken(f"epoch {event.epoch} was started after {self.epoch}: epochs only grow")
        self.epoch = event.epoch

    def _checkpoint_saved(self, event: j.CheckpointSaved) -> None:
        self._trained = {group: entry for group, entry in self._trained.items() if entry.step > event.version.step}

    def _rolled_back(self, event: j.RolledBack) -> None:
        """Queue everything trained after the step again, ahead of all other prompts."""
        void = self.trained_after(event.step)
        for entry in void:
            del self._trained[entry.group]
        self._waiting = {entry.ticket.number: entry.ticket for entry in void} | self._waiting
        self.step = event.step


def replay(events: Iterable[j.JournalEvent]) -> RunState:
    """The state after these events, from the last snapshot among them."""
    lineage = Lineage()
    for event in events:
        if isinstance(event, j.Snapshot):
            lineage = Lineage(event.state)
        else:
            lineage.apply(event)
    return lineage.state()
