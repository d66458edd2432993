"""The journal: every state change of the controller as a typed event.

`at` is the time of the controller's loop in seconds. The history of every trajectory, group, claim, engine and version
can be derived from these events alone; reports and audits read nothing else.
"""

import enum
import math
from typing import Any

import msgspec

from rollart.types.affinity import AffinityCause, AffinityFigures, AffinityRules
from rollart.types.elasticity import ElasticCause, ElasticFigures, ElasticRules
from rollart.types.failures import FailureKind, StopReason
from rollart.types.ids import ClaimId, GroupId, PromptId, TrajectoryId, WorkerId
from rollart.types.messages import Role
from rollart.types.reward_use import RewardUse
from rollart.types.rewards import RewardRule
from rollart.types.snapshot import RunState
from rollart.types.trajectory import GroupOutcome, Outcome, Prompt, Purpose
from rollart.types.versions import Version


class Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Base of all events. Plain data in large numbers, never part of a cycle, so not tracked by the GC (`gc=False`)."""

    at: float


# --- the run --------------------------------------------------------------------------------------------------------


class GroupRules(msgspec.Struct, frozen=True, gc=False):
    """Group rules of the run, by task where tasks may differ; see `config.schema`."""

    min_size: int
    max_extra: int
    alpha: dict[str, int]
    late_alpha: dict[str, int]
    stale_retries: dict[str, int]


class RunStarted(Event, frozen=True):
    name: str
    mode: str
    alpha: int
    seed: int
    groups_per_batch: dict[str, int]
    group_size: int
    extra_groups: int = 0
    step_bound_s: float = math.inf
    """Maximum duration of a step, or of the start of a trainer (`policy.liveness`)."""
    rules: GroupRules | None = None
    """None in journals of before groups could be trained with fewer members, or more."""
    affinity: AffinityRules | None = None
    """None unless tasks find their hardware class by measurement."""
    rewards: dict[str, tuple[RewardRule, ...]] = {}
    """Rewards of the tasks that have several, a group reward, a weight or a default."""
    elasticity: ElasticRules | None = None
    """None unless the number of a pool's engines may change."""


class RunEnded(Event, frozen=True):
    steps: int
    reason: str = ""
    """`stop` in words, with the error, or why `on_step` ended the run; empty if the run finished all its steps."""
    stop: StopReason = StopReason.DONE


class RunResumed(Event, frozen=True):
    """A new controller resumes the run; the events that follow cancel what was in flight at the old one.

    Times before and after it are of different clocks."""

    mode: str
    alpha: int
    step_bound_s: float = math.inf
    rules: GroupRules | None = None
    affinity: AffinityRules | None = None
    rewards: dict[str, tuple[RewardRule, ...]] = {}
    elasticity: ElasticRules | None = None


class EpochStarted(Event, frozen=True):
    """A trainer started, from the checkpoint of `step`. Durable before its first publication."""

    epoch: int
    step: int


class RolledBack(Event, frozen=True):
    """The lineage continues from `step`: later steps are void, and their prompts are queued again."""

    epoch: int
    step: int
    groups: tuple[GroupId, ...]


class CheckpointSaved(Event, frozen=True):
    """The trainer can restart from here: everything up to `version` is settled."""

    version: Version


class CheckpointFailed(Event, frozen=True):
    """A checkpoint was not saved. The previous one stays."""

    version: Version
    reason: str


class Snapshot(Event, frozen=True):
    """State of the run: a resume reads the last one and the events after it."""

    state: RunState


class StallReported(Event, frozen=True):
    """No progress for a while: the open waits, one line each."""

    waits: tuple[str, ...]


# --- workers --------------------------------------------------------------------------------------------------------


class WorkerSpawned(Event, frozen=True):
    worker: WorkerId
    role: Role
    pool: str


class WorkerWaits(Event, frozen=True):
    """No node has room for a worker."""

    worker: WorkerId
    why: str


class WorkerPlaced(Event, frozen=True):
    """A worker starts on a node. `why`: why it is not of the preferred kind, such as `H800 missing`."""

    worker: WorkerId
    node: str
    why: str = ""


class WorkerJoined(Event, frozen=True):
    worker: WorkerId


class WorkerLeaves(Event, frozen=True):
    """A worker gets no new work and finishes what it has, because its node drains or a better one has room."""

    worker: WorkerId
    why: str


class WorkerLeft(Event, frozen=True):
    """A worker that was leaving is stopped. `unfinished`: it ran out of time."""

    worker: WorkerId
    unfinished: bool = False


class RoomChanged(Event, frozen=True):
    """The nodes have room for this many engines of an elastic pool, those running included."""

    pool: str
    engines: int


class EnginesChanged(Event, frozen=True):
    """Engines of an elastic pool were added or removed; removed ones drain first."""

    pool: str
    cause: ElasticCause
    before: int
    after: int
    changed: tuple[str, ...]
    """Names of the engines that were added or removed, without their incarnation."""
    why: str
    figures: ElasticFigures
    since: float
    """Time from which on the reason has held."""


class EnginesForgiven(Event, frozen=True):
    """Engines of an elastic pool that were removed because they kept dying may be added again: a node has joined."""

    pool: str
    engines: tuple[str, ...]


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
    """The engine could not load the version and is out of service until it has one."""

    worker: WorkerId
    reason: str


class WeightsSynced(Event, frozen=True):
    """All engines in service have the version.

    `suspended_s`: time without engine steps; `exposed_s`: time that the sync waited for publication and staging.
    """

    version: Version
    suspended_s: float
    exposed_s: float


# --- groups and trajectories ----------------------------------------------------------------------------------------


class PromptTaken(Event, frozen=True):
    """A prompt was taken from its source; `cursor` is the position of the source after it.

    `ticket` numbers the prompts taken: a source may repeat a prompt while it is still in flight.
    """

    ticket: int
    prompt: Prompt
    cursor: dict[str, Any]


class GroupOpened(Event, frozen=True):
    """A group was opened. `ticket` is -1 for an evaluation, whose prompts are not from a training source."""

    group: GroupId
    task: str
    prompt: PromptId
    purpose: Purpose
    ticket: int
    attempt: int
    alpha: int | None = None
    """Staleness bound of its own, after too many losses of its prompt; None = its task's."""


class TrajectoryStarted(Event, frozen=True):
    trajectory: TrajectoryId
    group: GroupId
    member: int
    attempt: int
    environment: str


class Placed(Event, frozen=True):
    """A trajectory's turns run on this engine from here on. `reason` is empty for the preferred class."""

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


class RewardGiven(Event, frozen=True):
    """One of several rewards: of one trajectory, or of all members of a group that were compared with each other.

    Once per trajectory and name. Tasks with one plain reward have it only if that consists of named parts.
    """

    name: str
    trajectories: tuple[TrajectoryId, ...]
    values: tuple[float, ...]
    parts: tuple[dict[str, float], ...] = ()
    """Named parts of each value, if the function gives them."""
    defaulted: bool = False
    """The reward failed for good, and its values are the declared default."""


class RewardFailed(Event, frozen=True):
    """One of several rewards failed for good. The trajectories get its default, or end as `reward_failed`."""

    name: str
    trajectories: tuple[TrajectoryId, ...]
    reason: str


class RewardArrived(Event, frozen=True):
    """The reward of a finished episode: once per trajectory, however often it was requested and answered.

    With several rewards, their weighted sum.
    """

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
    failure: FailureKind | None = None
    """How it failed, if `outcome` is a failure."""


class MembersLost(Event, frozen=True):
    """A group lost members to the staleness bound and goes on with the others. Running ones end as stale."""

    group: GroupId
    trajectories: tuple[TrajectoryId, ...]
    alpha: int | None = None
    """Staleness bound of its own from here on, after too many losses of its prompt."""


class MemberReplaced(Event, frozen=True):
    """A late member would miss the staleness bound. It ends as stale, and a new one takes its place."""

    group: GroupId
    trajectory: TrajectoryId


class GroupEnded(Event, frozen=True):
    group: GroupId
    outcome: GroupOutcome
    requeued: bool
    cause: str = ""


# --- batches --------------------------------------------------------------------------------------------------------


class BatchClaimed(Event, frozen=True):
    """A batch was claimed; durable before the trainer sees it. `staleness` has one entry per group, without masked
    members."""

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


class RedundancyChanged(Event, frozen=True):
    """The number of extra members changed for groups of a task that are opened from here on."""

    task: str
    extra: int
    missing: float
    """Share of its members that failed or were late."""
    short: float
    """Share of its groups that would be short of results without extra members."""


class AffinityChanged(Event, frozen=True):
    """Tasks were assigned to hardware classes by measurement; their next trajectories go there.

    `score` is that of the assignment, `score_before` that of the best one without this decision; the same if there was
    none. Both follow from `figures` (`types.affinity`).
    """

    cause: AffinityCause
    assigned: dict[str, str]
    """Every assigned task and its class, from here on."""
    before: dict[str, str]
    """The same, before."""
    why: dict[str, str]
    """A sentence for every task that changed."""
    figures: AffinityFigures
    score: float
    score_before: float
    since: float
    """Time from which on the gain, or the loss of the class, has lasted."""


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
    """One round of held-out episodes. `mean_reward` is over those that ended with a reward: mean@k."""

    task: str
    step: int
    episodes: int
    scored: int
    mean_reward: float | None
    samples: int = 1
    """Attempts at each prompt."""
    pass_at: dict[str, float] = {}
    """pass@k by k; empty if there was one attempt at each prompt."""


class TimeUse(enum.StrEnum):
    """Use of a pool's worker time: busy, or idle for one named cause."""

    BUSY = "busy"
    """Working. An engine is busy while it has requests, including those in transit."""
    WEIGHT_SYNC = "weight_sync"
    """Idle: rollout is suspended for an update, or the trainer waits for it."""
    BARRIER = "barrier"
    """Idle engine: a turn is over, but the batch is waiting at its barrier."""
    ENVIRONMENT = "environment"
    """Idle engine: more could start, but all environments are busy; the agents are in their environments."""
    TAIL = "tail"
    """Idle engine: nothing may start before the next batch is complete, and its last trajectories are elsewhere."""
    REWARD = "reward"
    """Idle engine: the episodes are over, but their rewards are pending."""
    TRAINING = "training"
    """Idle engine: the next batch is complete, or all of it is with the trainer; rollout may not run further ahead."""
    NO_WORK = "no_work"
    """Idle for none of these causes: start-up and the end of the run."""
    ROLLOUT = "rollout"
    """Idle trainer: the next batch is not complete."""
    GENERATION = "generation"
    """Idle environment: agents wait for their turns."""
    ADMISSION = "admission"
    """Idle environment: no episode runs and none may start."""


class PoolTime(Event, frozen=True):
    """Use of a pool's worker time since the last such event, in worker-seconds.

    `stepping_s` is the time that engines measured in their steps, and `recompute_s` the part of it spent on KV
    invalidated by an update; 0 if they do not measure it.
    """

    pool: str
    seconds: dict[TimeUse, float]
    stepping_s: float = 0.0
    recompute_s: float = 0.0


class RewardsUsed(Event, frozen=True):
    """Use of reward functions since the last such event, by `TASK/REWARD`."""

    uses: dict[str, RewardUse]


JournalEvent = (
    RunStarted
    | RunEnded
    | EpochStarted
    | StallReported
    | WorkerSpawned
    | WorkerWaits
    | WorkerPlaced
    | WorkerJoined
    | WorkerLeaves
    | WorkerLeft
    | RoomChanged
    | EnginesChanged
    | EnginesForgiven
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
    | RewardGiven
    | RewardFailed
    | RewardArrived
    | TrajectoryEnded
    | MembersLost
    | MemberReplaced
    | GroupEnded
    | RedundancyChanged
    | AffinityChanged
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
    | RewardsUsed
)
