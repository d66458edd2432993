"""What the controller and its workers say to each other: one type per intent.

Commands go out and events come back in batches (`Runtime.post`, `Worker.advance`). While a worker lives, the runtime
delivers each once and in order (`ports.channel` does that over a link that does not). Each still names what it is about
(request, episode and turn, claim, version), and receivers ignore what they have seen: what is asked again after a
deadline, or answered late, changes nothing. They are plain data and never part of a cycle, so the garbage collector
need not look at them (`gc=False`).

    role         commands                                      events
    engine       Add Abort EndSession Suspend Resume           TurnDone PrefixMiss Refused Progress
                 Stage Update                                  Staged StageFailed Updated
    environment  Reset Step Close                              Observed EnvironmentFailed
    reward       Score                                         Scored ScoreFailed
    trainer      Train Publish Save                            Trained Published TrainerFailed Saved SaveFailed
"""

import enum

import msgspec

from rollart.types.ids import ClaimId, RequestId, TrajectoryId
from rollart.types.tokens import Generated, Segment
from rollart.types.trajectory import Prompt, TrainSample
from rollart.types.versions import Version
from rollart.types.weights import Manifest

# --- engine ---------------------------------------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """How to sample. The log-probability that is reported is always that of the full softmax at `temperature`.

    `top_p` and `top_k` cut the set that is sampled from, which training does not know of: they are for evaluation. An
    engine that does not honour one of these answers `Refused`.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability; 1 is all of them."""
    top_k: int = 0
    """Sample from so many of the likeliest tokens; 0 is all of them."""
    stop_strings: tuple[str, ...] = ()
    """The turn ends with the token that completes one of these in the decoded text."""

    @property
    def is_plain(self) -> bool:
        """Neither a cut set nor stop strings: what every engine can do."""
        return self.top_p >= 1.0 and not self.top_k and not self.stop_strings


class Add(msgspec.Struct, frozen=True, gc=False):
    """Generate one turn. Only what is new travels: `new` follows the first `prefix_length` tokens of the session.

    An engine that does not hold that prefix (by length and digest) answers `PrefixMiss`, which ends the request, and
    gets the whole in another one, with `prefix_length` 0, which always replaces what the session held.
    """

    request: RequestId
    """Larger than any before it, so that a double is known by it."""
    session: TrajectoryId
    task: str
    prefix_length: int
    prefix_digest: bytes
    new: Segment
    sampling: Sampling


class Abort(msgspec.Struct, frozen=True, gc=False):
    """End a request; answered by `TurnDone(ABORTED)` with what was generated, while suspended too.

    Unknown requests are ignored.
    """

    request: RequestId


class EndSession(msgspec.Struct, frozen=True, gc=False):
    """The trajectory is over: free what is kept for it."""

    session: TrajectoryId


class Suspend(msgspec.Struct, frozen=True, gc=False):
    """Take no step until `Resume`; requests in flight are kept."""


class Resume(msgspec.Struct, frozen=True, gc=False):
    """Go on after `Suspend`."""


class Stage(msgspec.Struct, frozen=True, gc=False):
    """Fetch a version beside the one in service, while generation goes on; verified by the digests of this manifest."""

    manifest: Manifest


class Update(msgspec.Struct, frozen=True, gc=False):
    """Between two steps, serve the staged version from now on; answered while suspended too.

    A version that is not staged, or is older than the one in service, is answered by `StageFailed` and changes
    nothing; the one in service is answered by `Updated` again.
    """

    version: Version


EngineCommand = Add | Abort | EndSession | Suspend | Resume | Stage | Update


class FinishReason(enum.Enum):
    """Why a turn ended."""

    STOP = "stop"
    """A stop token was sampled, or a stop string completed; that token is the last."""
    LENGTH = "length"
    """`max_tokens` or the engine's context ended it."""
    ABORTED = "aborted"
    """An `Abort` ended it."""


class TurnUsage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a turn cost, in tokens. `recomputed` is KV computed again because an update made it void.

    At the start of a turn each token of its prompt is exactly one of the three; recomputation in mid-turn adds to
    `recomputed`.
    """

    prefilled: int = 0
    cached: int = 0
    recomputed: int = 0


class TurnDone(msgspec.Struct, frozen=True, gc=False):
    """A request ended. `generated` is what came after the last `Progress` of this request."""

    request: RequestId
    generated: Generated
    finish: FinishReason
    usage: TurnUsage


class PrefixMiss(msgspec.Struct, frozen=True, gc=False):
    """The session's prefix is not here and the request is forgotten; send the whole, under the same id or a new one."""

    request: RequestId


class Refused(msgspec.Struct, frozen=True, gc=False):
    """The request can never be served here (too long, no weights yet); the engine is well."""

    request: RequestId
    reason: str


class Progress(msgspec.Struct, frozen=True, gc=False):
    """Tokens sampled since the last report, so that a fail-over resumes at the token position.

    An engine with requests in flight, and not suspended, reports at least every `progress_interval_s`, with or without
    tokens to show: silence is how a stopped engine is noticed.
    """

    parts: tuple[tuple[RequestId, Generated], ...]
    steps: int
    stepping_s: float = 0.0
    """What its steps took since the last report; 0 of an engine that does not measure it."""
    recompute_s: float = 0.0
    """Of that, for KV that an update had made void."""


class Staged(msgspec.Struct, frozen=True, gc=False):
    """Every rank holds the version, verified by digest."""

    version: Version


class StageFailed(msgspec.Struct, frozen=True, gc=False):
    """The version could not be fetched or verified. The version in service stays."""

    version: Version
    reason: str


class Updated(msgspec.Struct, frozen=True, gc=False):
    """The version is in service; every later token carries it."""

    version: Version


EngineEvent = TurnDone | PrefixMiss | Refused | Progress | Staged | StageFailed | Updated


class KvOnUpdate(enum.Enum):
    """What an engine does with the KV cache when its weights change."""

    RECOMPUTE = "recompute"
    KEEP = "keep"


class EngineInfo(msgspec.Struct, frozen=True, gc=False):
    """What an engine can do, said when it joins."""

    slots: int
    """Requests that it can run at once; more are queued."""
    max_context: int
    kv_on_update: KvOnUpdate = KvOnUpdate.RECOMPUTE
    sessions: bool = True
    """Keeps a session's prefix between turns."""
    progress_interval_s: float = 5.0


# --- environment ----------------------------------------------------------------------------------------------------


class Reset(msgspec.Struct, frozen=True, gc=False):
    """Start an episode in one of the worker's environments: a fresh one, whatever was there before is closed.

    A slot that does not exist is answered by `EnvironmentFailed`.
    """

    episode: TrajectoryId
    slot: int
    prompt: Prompt
    member: int


class Step(msgspec.Struct, frozen=True, gc=False):
    """Act. `action` is what the engine sampled in this turn, counted from 1; decoded beside the environment.

    Of an episode that is unknown, closed or replaced: answered by `EnvironmentFailed`.
    """

    episode: TrajectoryId
    turn: int
    action: Segment


class Close(msgspec.Struct, frozen=True, gc=False):
    """The episode is over, or given up: free its environment."""

    episode: TrajectoryId


EnvironmentCommand = Reset | Step | Close


class Observed(msgspec.Struct, frozen=True, gc=False):
    """The answer to `Reset` (turn 0) or to `Step` (its turn).

    `new_sequence`: the agent rewrote its history; `observation` is the whole new context.
    `truncated`: ended by a limit of the agent's own, which is its result.
    `artifact`: at the end of the episode, what the reward function needs to see.
    `state`: the key of the state that the environment is in now (`types.trajectory.state_key`); empty: it is what the
    observation's tokens tell.
    """

    episode: TrajectoryId
    turn: int
    observation: Segment
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    new_sequence: bool = False
    artifact: bytes = b""
    state: bytes = b""


class EnvironmentFailed(msgspec.Struct, frozen=True, gc=False):
    """The environment itself failed: not the agent's doing.

    `wrong`: its code is, so that another try ends the same way; what an outage may cause is not.
    """

    episode: TrajectoryId
    turn: int
    reason: str
    wrong: bool = False


EnvironmentEvent = Observed | EnvironmentFailed


class EnvironmentInfo(msgspec.Struct, frozen=True, gc=False):
    """What an environment worker hosts."""

    task: str
    slots: int


# --- reward ---------------------------------------------------------------------------------------------------------


class Score(msgspec.Struct, frozen=True, gc=False):
    """Compute the final reward of a trajectory. Stateless: the same key always means the same question."""

    key: str
    trajectory: TrajectoryId
    task: str
    prompt: Prompt
    turn_rewards: tuple[float, ...]
    artifact: bytes
    truncated: bool


class Scored(msgspec.Struct, frozen=True, gc=False):
    key: str
    value: float


class ScoreFailed(msgspec.Struct, frozen=True, gc=False):
    key: str
    reason: str
    retry: bool = True
    """Whether asking again may help (429, 5xx), or the answer will be the same."""


RewardCommand = Score
RewardEvent = Scored | ScoreFailed


class RewardInfo(msgspec.Struct, frozen=True, gc=False):
    """What a reward worker can do."""

    slots: int
    """Questions that it answers at once; more are queued."""
    elastic: bool = False
    """Grows and shrinks with the load, to zero too: never idle, so its `slots` are no capacity to account for."""
    tasks: tuple[str, ...] = ()
    """The tasks that it can score; none named: all."""


# --- trainer --------------------------------------------------------------------------------------------------------


class Train(msgspec.Struct, frozen=True, gc=False):
    """Train on a claimed batch, in one optimiser step or several; the weights become `version`."""

    claim: ClaimId
    version: Version
    samples: tuple[TrainSample, ...]


class Publish(msgspec.Struct, frozen=True, gc=False):
    """Write the current weights to the store as `version`. Asked again, answered alike; an older one is refused."""

    version: Version


class Save(msgspec.Struct, frozen=True, gc=False):
    """Make the current weights, and all that training needs to go on from them, durable as the checkpoint of `version`.

    Whole or not at all: until `Saved`, a trainer that starts anew finds the checkpoint before it.
    """

    version: Version


TrainerCommand = Train | Publish | Save


class Trained(msgspec.Struct, frozen=True, gc=False):
    claim: ClaimId
    version: Version
    metrics: dict[str, float]


class Published(msgspec.Struct, frozen=True, gc=False):
    manifest: Manifest


class TrainerFailed(msgspec.Struct, frozen=True, gc=False):
    """A command could not be carried out; the weights are those of before."""

    claim: ClaimId | None
    reason: str


class Saved(msgspec.Struct, frozen=True, gc=False):
    version: Version


class SaveFailed(msgspec.Struct, frozen=True, gc=False):
    """The disk is full, say. The checkpoint before it is whole."""

    version: Version
    reason: str


TrainerEvent = Trained | Published | TrainerFailed | Saved | SaveFailed


class TrainerInfo(msgspec.Struct, frozen=True, gc=False):
    """What a trainer is, said when it joins."""

    parameters: int
    restored: Version | None = None
    """The checkpoint that it starts from; None: it starts fresh."""


# --- any role -------------------------------------------------------------------------------------------------------

WorkerCommand = EngineCommand | EnvironmentCommand | RewardCommand | TrainerCommand
WorkerEvent = EngineEvent | EnvironmentEvent | RewardEvent | TrainerEvent
WorkerInfo = EngineInfo | EnvironmentInfo | RewardInfo | TrainerInfo


class Role(enum.Enum):
    """What a worker does."""

    ENGINE = "engine"
    ENVIRONMENT = "environment"
    REWARD = "reward"
    TRAINER = "trainer"
