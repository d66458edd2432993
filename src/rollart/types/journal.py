"""The journal: every state change of the controller as a typed event.

`at` is the time of the controller's loop in seconds. What happened to a trajectory, a group, a claim, an engine or a
version can be told from these events alone; reports and audits read nothing else.
"""

import math
from typing import Any

import msgspec

from rollart.types.ids import ClaimId, GroupId, PromptId, TrajectoryId, WorkerId
from rollart.types.messages import Role
from rollart.types.snapshot import RunState
from rollart.types.trajectory import GroupOutcome, Outcome, Prompt, Purpose
from rollart.types.versions import Version


class Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Plain data, made by the million: never part of a cycle, so the collector need not look at it (`gc=False`)."""

    at: float


# --- the run --------------------------------------------------------------------------------------------------------


class RunStarted(Event, frozen=True):
    name: str
    mode: str
    alpha: int
    seed: int
    groups_per_batch: dict[str, int]
    group_size: int
    extra_groups: int = 0
    step_bound_s: float = math.inf
    """How long a step may take, or the start of a trainer (`policy.liveness`)."""


class RunEnded(Event, frozen=True):
    steps: int
    reason: str = ""
    """Empty when the run did all its steps."""


class RunResumed(Event, frozen=True):
    """A new controller goes on with the run; what was in flight at the old one is cancelled in the events that follow.

    Times before and after are of different clocks."""

    mode: str
    alpha: int
    step_bound_s: float = math.inf


class EpochStarted(Event, frozen=True):
    """A trainer started, from the checkpoint of `step`. Durable before its first publication."""

    epoch: int
    step: int


class RolledBack(Event, frozen=True):
    """The lineage goes on from `step`: what was trained after it is void, and those prompts wait again."""

    epoch: int
    step: int
    groups: tuple[GroupId, ...]


class CheckpointSaved(Event, frozen=True):
    """The trainer can come back from here: everything up to `version` is settled."""

    version: Version


class CheckpointFailed(Event, frozen=True):
    """The checkpoint before it stays."""

    version: Version
    reason: str


class Snapshot(Event, frozen=True):
    """The state of the run: a resume reads the last one and what comes after it."""

    state: RunState


class StallReported(Event, frozen=True):
    """Nothing moved for a while: what is waited for, one line each."""

    waits: tuple[str, ...]


# --- workers --------------------------------------------------------------------------------------------------------


class WorkerSpawned(Event, frozen=True):
    worker: WorkerId
    role: Role
    pool: str


class WorkerJoined(Event, frozen=True):
    worker: WorkerId


class WorkerDied(Event, frozen=True):
    worker: WorkerId
    reason: str
    action: str


class Quarantined(Event, frozen=True):
    """A part failed so often that it gets no work until `until`."""

    part: str
    failures: int
    until: float
    reason: str


# --- weights --------------------------------------------------------------------------------------------------------


class VersionPublished(Event, frozen=True):
    version: Version
    nbytes: int


class EngineUpdated(Event, frozen=True):
    """The engine is in service with this version from here on."""

    worker: WorkerId
    version: Version


class EngineOutOfService(Event, frozen=True):
    """The engine could not take the version and serves nothing until it has one."""

    worker: WorkerId
    reason: str


class WeightsSynced(Event, frozen=True):
    """All engines in service have the version.

    `suspended_s`: how long no step was taken; `exposed_s`: how long the sync waited for publication and staging.
    """

    version: Version
    suspended_s: float
    exposed_s: float


# --- groups and trajectories ----------------------------------------------------------------------------------------


class PromptTaken(Event, frozen=True):
    """A prompt was taken from its source; `cursor` is where the source stands after it.

    `ticket` numbers what was taken: a source may give a prompt again while it is still in flight.
    """

    ticket: int
    prompt: Prompt
    cursor: dict[str, Any]


class GroupOpened(Event, frozen=True):
    """`ticket` is -1 for an evaluation, whose prompts are not taken from a training source."""

    group: GroupId
    task: str
    prompt: PromptId
    purpose: Purpose
    ticket: int
    attempt: int


class TrajectoryStarted(Event, frozen=True):
    trajectory: TrajectoryId
    group: GroupId
    member: int
    attempt: int
    environment: str


class Placed(Event, frozen=True):
    """A trajectory's turns go to an engine from here on. `reason` is empty for the preferred class."""

    trajectory: TrajectoryId
    engine: WorkerId
    hardware: str
    reason: str = ""


class TurnEnded(Event, frozen=True):
    trajectory: TrajectoryId
    turn: int
    engine: WorkerId
    sampled: int
    prefilled: int
    cached: int
    recomputed: int
    versions: tuple[tuple[Version, int], ...]


class TurnAborted(Event, frozen=True):
    """A turn was stopped; `sampled` tokens of it are wasted. May come after the end of its trajectory."""

    trajectory: TrajectoryId
    engine: WorkerId
    sampled: int


class RewardArrived(Event, frozen=True):
    """The reward of a finished episode: once per trajectory, however often it was asked for and answered."""

    trajectory: TrajectoryId
    value: float


class TrajectoryEnded(Event, frozen=True):
    trajectory: TrajectoryId
    outcome: Outcome
    turns: int
    sampled: int
    reward: float | None = None
    first: Version | None = None
    last: Version | None = None
    masked: bool = False
    cause: str = ""


class GroupEnded(Event, frozen=True):
    group: GroupId
    outcome: GroupOutcome
    requeued: bool
    cause: str = ""


# --- batches --------------------------------------------------------------------------------------------------------


class BatchClaimed(Event, frozen=True):
    """Durable before the trainer sees the batch. `staleness` holds one entry per group, masked members left out."""

    claim: ClaimId
    step: int
    served: Version
    trained: Version
    groups: tuple[GroupId, ...]
    trajectories: tuple[TrajectoryId, ...]
    staleness: tuple[int, ...]
    lag: tuple[int, ...]
    masked: tuple[TrajectoryId, ...] = ()
    rewards: dict[str, float] = {}
    """Mean reward per task."""


class StepTrained(Event, frozen=True):
    claim: ClaimId
    version: Version
    seconds: float
    metrics: dict[str, float]


class ClaimReturned(Event, frozen=True):
    claim: ClaimId
    cause: str


class ShareRedistributed(Event, frozen=True):
    """A task could not fill its share by its deadline; others fill in for this batch."""

    step: int
    missing: dict[str, int]
    filled_by: dict[str, int]
    cause: str


class EvalEnded(Event, frozen=True):
    """One round of held-out episodes. `mean_reward` is over those that ended with a reward."""

    task: str
    step: int
    episodes: int
    scored: int
    mean_reward: float | None


class PoolTime(Event, frozen=True):
    """Where the time of a pool's workers went since the last such event: worker-seconds by cause, `busy` among them.

    An engine is `busy` while it has requests, be they on their way; `stepping_s` is what engines say that their steps
    took, and `recompute_s`, of that, what they spent on KV that an update had made void. 0: they do not measure it.
    """

    pool: str
    seconds: dict[str, float]
    stepping_s: float = 0.0
    recompute_s: float = 0.0


JournalEvent = (
    RunStarted
    | RunEnded
    | EpochStarted
    | StallReported
    | WorkerSpawned
    | WorkerJoined
    | WorkerDied
    | Quarantined
    | VersionPublished
    | EngineUpdated
    | EngineOutOfService
    | WeightsSynced
    | GroupOpened
    | TrajectoryStarted
    | Placed
    | TurnEnded
    | TurnAborted
    | RewardArrived
    | TrajectoryEnded
    | GroupEnded
    | BatchClaimed
    | StepTrained
    | ClaimReturned
    | ShareRedistributed
    | PromptTaken
    | RunResumed
    | RolledBack
    | CheckpointSaved
    | CheckpointFailed
    | Snapshot
    | EvalEnded
    | PoolTime
)
