"""What the audit remembers: plain data, so that it can be encoded in the middle of a journal.

Bounded by what is in flight plus what was trained since the last checkpoint; the journal of a month can be audited.
Each part of `AuditState` is written by the module of one rule and may be read by all.
"""

import math
from typing import NamedTuple

import msgspec

from rollart.types import journal as j
from rollart.types.affinity import AffinityRules
from rollart.types.elasticity import ElasticRules
from rollart.types.ids import ClaimId, GroupId, TrajectoryId, WorkerId
from rollart.types.messages import Role
from rollart.types.versions import Version

MAX_LISTED = 10_000
"""Maximum number of violations kept in words; further ones are counted."""


class Violation(NamedTuple):
    """A rule that does not hold: which one, at which event (counted from 0), and how."""

    rule: int
    event: int
    what: str

    def __str__(self) -> str:
        return f"rule {self.rule}, event {self.event}: {self.what}"


class TrajectoryState(msgspec.Struct, array_like=True):
    """A trajectory that runs, or a member of an open group."""

    id: TrajectoryId
    group: GroupId
    turns: int = 0
    sampled: int = 0
    first: Version | None = None
    last: Version | None = None
    engine: WorkerId | None = None
    engines: list[WorkerId] = []
    """Possible sources of the tokens of the next turn: the engine of the last turn, and later placements."""
    since: Version | None = None
    """Lower bound on the version of future tokens: the oldest of those engines' versions at the placement."""
    reward: float | None = None
    ended: bool = False
    masked: bool = False
    given: dict[str, float] = {}
    """Rewards that were given, by name."""
    failed: list[str] = []
    """Rewards that failed for good."""


class GroupState(msgspec.Struct, array_like=True):
    """A group that is open, ready or claimed."""

    opened: j.GroupOpened
    members: list[TrajectoryId] = []
    results: list[TrajectoryId] = []
    """Members that ended with a result and were not lost, in that order."""
    claim: ClaimId | None = None
    trained: int | None = None
    """The step that it was trained in."""
    alpha: int | None = None
    """A staleness bound of its own."""
    lost: list[TrajectoryId] = []
    """Members that it lost to the staleness bound."""
    replaced: list[TrajectoryId] = []
    """Members that it replaced before that."""
    judged: dict[str, list[TrajectoryId]] = {}
    """By reward that compares members: those that were compared last."""
    rolled_back: bool = False
    """Whether the run was rolled back since it was opened."""

    @property
    def id(self) -> GroupId:
        return self.opened.group


class ClaimState(msgspec.Struct, array_like=True):
    """A claim that neither ended in a step nor was returned."""

    claimed: j.BatchClaimed
    took: list[GroupId] = []
    """Its groups that were ready, each once: all of them in a sound journal."""


class EngineState(msgspec.Struct, array_like=True):
    """An engine that lives, or a dead one whose tokens may still be reported."""

    joined: bool = False
    dead: bool = False
    version: Version | None = None
    had: list[Version] = []
    """Versions it has served and that a token to come may still carry."""


class AffinityState(msgspec.Struct):
    """What the audit knows of the automatic affinity of a run."""

    rules: AffinityRules
    assigned: dict[str, str] = {}
    moves: dict[str, tuple[int, float]] = {}
    """Moves for a gain, and the time of the last one, by task."""
    engines: dict[str, list[WorkerId]] = {}
    """Engines of every class that take new turns."""
    changed_at: dict[str, float] = {}
    """When a class got its first engine, or lost its last."""
    stepped_at: float = -math.inf
    """Time of the last training step."""
    placed: dict[str, int] = {}
    """Trajectories that were placed, by task."""
    probes: dict[str, int] = {}
    """Trajectories that were spent on measuring, by task."""


class ElasticPoolState(msgspec.Struct):
    """What the audit knows of an elastic pool."""

    wanted: int
    active: list[str] = []
    """Engines that run or are to run, without their incarnation."""
    opening: bool = True
    """Whether its first engines may still start."""
    workers: dict[WorkerId, float | None] = {}
    """Living engines, and since when those that leave do so."""
    given_up: list[str] = []
    """Engines that were removed because they kept dying."""
    room: int | None = None
    sign: int = 0
    """1 if it should have more engines for its nodes, -1 if fewer, ..."""
    sign_since: float = -math.inf
    """... and since when."""
    held_since: float = -math.inf
    """The same, without interruptions of less than a tick, which the policy may not have seen."""
    ended: dict[int, tuple[float, float]] = {}
    """By sign: start and end of the last period in which it held."""
    direction: int = 0
    """1 if it last grew for training, -1 if it shrank."""
    turns: int = 0
    held_until: float = -math.inf
    steps: list[tuple[float, ...]] = []
    """The last whole steps since the last change: `policy.elasticity.StepUse`."""
    fresh: bool = False


class ElasticState(msgspec.Struct):
    """What the audit knows of the elastic pools of a run."""

    rules: ElasticRules
    pools: dict[str, ElasticPoolState]
    changed_at: float
    """When a pool changed last."""
    waiting: dict[WorkerId, float] = {}
    """Workers of other pools that wait for a node, and since when."""
    waited_at: float = -math.inf
    """When one of them ceased to wait."""
    trainer_waits_since: dict[WorkerId, float] = {}
    trainer_gone: tuple[float, float] = (-math.inf, -math.inf)
    """Wait (start, end) of the last trainer that died without a node; its successor continues the wait."""
    must_leave: list[WorkerId] = []
    """Removed engines that have not begun to leave."""
    step: dict[str, j.PoolTime] | None = None
    """Use of time of the last step, while it is being read."""


class AuditState(msgspec.Struct, kw_only=True):
    """The whole memory of an audit; see the module."""

    violations: list[Violation] = []
    """The first `MAX_LISTED`."""
    unlisted: int = 0
    """Number of further violations."""
    count: int = 0
    """Events so far."""
    at: float = -math.inf
    """Time of the last event."""

    # run
    run: j.RunStarted | None = None
    ended: j.RunEnded | None = None
    roles: dict[WorkerId, tuple[Role, str]] = {}
    """Role and pool of the last incarnation of every place."""
    incarnations: dict[str, int] = {}

    # conservation
    groups: dict[GroupId, GroupState] = {}
    next_group: int = 0
    trajectories: dict[TrajectoryId, TrajectoryState] = {}
    """Trajectories without an outcome, and all members of open groups."""
    next_trajectory: int = 0
    claims: dict[ClaimId, ClaimState] = {}

    # prompts
    tickets: dict[int, str] = {}
    """Every ticket that is not settled: waiting, open or trained."""
    next_ticket: int = 0
    tasks: dict[int, str] = {}
    """Task of every ticket that is not settled."""
    waiting: dict[str, int] = {}
    """Number of waiting tickets by task."""
    losses: dict[int, int] = {}
    """Tickets that lost members to the staleness bound, and how often."""
    lost_waiting: dict[str, int] = {}
    """Number of waiting tickets with losses, by task."""

    # lineage
    step: int = 0
    saved: int = 0
    """The step of the last checkpoint."""
    trained: dict[GroupId, tuple[int, int]] = {}
    """Groups trained since the last checkpoint: step and ticket."""

    # admission
    making: dict[str, int] = {}
    """Training groups that are open or ready, by task."""

    # shares
    redistributed: dict[int, list[j.ShareRedistributed]] = {}
    """By step; until the claim of that step."""

    # versions
    engines: dict[WorkerId, EngineState] = {}
    epoch: int = -1
    published: list[Version] = []
    """Versions published since the last sync, and the version of the run."""
    newest: Version | None = None
    """The version published last."""
    served: Version | None = None
    """The newest version that an engine has had in service."""
    synced: Version | None = None
    """The version of the run: of the last sync, or the first in service."""
    syncing: Version | None = None
    """The version that engines began to take in a sync that has not ended."""

    # liveness
    step_bound_s: float = math.inf
    stepping_since: float = 0.0
    """Time of the last step, or of the last start or loss of a trainer."""
    slowest_step_s: float = 0.0

    # affinity
    affinity: AffinityState | None = None
    """None unless tasks find their hardware class by measurement."""

    # elasticity
    elastic: ElasticState | None = None
    """None unless the number of a pool's engines may change."""

    def wrong(self, rule: int, what: str) -> None:
        """Report a violation at the current event."""
        if len(self.violations) < MAX_LISTED:
            self.violations.append(Violation(rule, self.count, what))
        else:
            self.unlisted += 1

    def running(self) -> list[TrajectoryState]:
        """Trajectories without an outcome."""
        return [trajectory for trajectory in self.trajectories.values() if not trajectory.ended]

    def groups_taken(self, claim: ClaimId) -> list[GroupState]:
        """The groups that a claim took, in its order."""
        return [self.groups[group] for group in self.claims[claim].took]
