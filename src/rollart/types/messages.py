"""Messages between the controller and its workers: one type per intent.

Commands are sent and events returned in batches (`Runtime.post`, `Worker.advance`). While a worker lives, the runtime
delivers each once and in order (`ports.channel` does that over an unreliable link). Each still names its subject
(request, episode and turn, claim, version), and receivers ignore duplicates: retries after a deadline and late answers
have no effect. Messages are plain data and never part of a cycle, so the garbage collector does not track them
(`gc=False`).

    role         commands                                      events
    engine       Add Abort EndSession Suspend Resume           TurnDone PrefixMiss Refused Progress
                 Stage Update                                  Staged StageFailed Updated
    environment  Reset Step Close                              Observed EnvironmentFailed
    reward       ScoreRequest                                  Scored ScoreFailed FunctionsUsed
    trainer      Train Publish Save                            Trained Published TrainerFailed Saved SaveFailed
"""

import enum

import msgspec

from rollart.types.ids import ClaimId, RequestId, TrajectoryId
from rollart.types.reward_use import RewardUse
from rollart.types.tokens import Generated, Segment
from rollart.types.trajectory import Prompt, TrainSample
from rollart.types.versions import Version
from rollart.types.weights import Manifest

# --- engine ---------------------------------------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """Sampling parameters. The reported log-probability is always that of the full softmax at `temperature`.

    `top_p` and `top_k` restrict the set that is sampled from, which training does not account for: they are for
    evaluation. An engine that does not support one of these answers `Refused`.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0
    top_p: float = 1.0
    """Sample from the most likely tokens with this total probability; 1 = all."""
    top_k: int = 0
    """Sample from this many of the most likely tokens; 0 = all."""
    stop_strings: tuple[str, ...] = ()
    """The turn ends with the token that completes one of these in the decoded text."""

    @property
    def is_plain(self) -> bool:
        """Whether there is neither a restricted set nor a stop string: supported by every engine."""
        return self.top_p >= 1.0 and not self.top_k and not self.stop_strings


class Add(msgspec.Struct, frozen=True, gc=False):
    """Generate one turn. Only new tokens are sent: `new` follows the first `prefix_length` tokens of the session.

    An engine that does not hold that prefix (by length and digest) answers `PrefixMiss`, which ends the request, and
    gets all tokens in another one with `prefix_length` 0, which always replaces the session's tokens.
    """

    request: RequestId
    """Larger than any before it, so that duplicates are recognised."""
    session: TrajectoryId
    task: str
    prefix_length: int
    prefix_digest: bytes
    new: Segment
    sampling: Sampling


class Abort(msgspec.Struct, frozen=True, gc=False):
    """End a request; answered by `TurnDone(ABORTED)` with the tokens generated so far, also while suspended.

    Unknown requests are ignored.
    """

    request: RequestId


class EndSession(msgspec.Struct, frozen=True, gc=False):
    """The trajectory is over: free its session."""

    session: TrajectoryId


class Suspend(msgspec.Struct, frozen=True, gc=False):
    """Take no step until `Resume`; requests in flight are kept."""


class Resume(msgspec.Struct, frozen=True, gc=False):
    """Continue after `Suspend`."""


class Stage(msgspec.Struct, frozen=True, gc=False):
    """Pull a version beside the one in service while generation continues; verified by the digests of this manifest."""

    manifest: Manifest


class Update(msgspec.Struct, frozen=True, gc=False):
    """Serve the staged version from now on, starting between two steps; answered also while suspended.

    A version that is not staged, or is older than the one in service, is answered by `StageFailed` and changes
    nothing; the one already in service is answered by `Updated` again.
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
    """Cost of a turn in tokens. `recomputed` is KV computed again because an update invalidated it.

    At the start of a turn each prompt token counts as exactly one of the three; recomputation in mid-turn adds to
    `recomputed`.
    """

    prefilled: int = 0
    cached: int = 0
    recomputed: int = 0


class TurnDone(msgspec.Struct, frozen=True, gc=False):
    """A request ended. `generated` holds the tokens after the last `Progress` of this request."""

    request: RequestId
    generated: Generated
    finish: FinishReason
    usage: TurnUsage


class PrefixMiss(msgspec.Struct, frozen=True, gc=False):
    """The session's prefix is not cached and the request is dropped; resend all tokens, under the same or a new id."""

    request: RequestId


class Refused(msgspec.Struct, frozen=True, gc=False):
    """The request can never be served here (too long, no weights yet); the engine itself is healthy."""

    request: RequestId
    reason: str


class TaskWork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Work of an engine for one task. The seconds of a step are divided among its tokens, of prompts and sampled."""

    task: str
    turns: int = 0
    """Turns that ended by themselves."""
    prefill_tokens: int = 0
    """Tokens computed before one was sampled: prompts, and KV invalidated by an update."""
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    decode_steps: float = 0.0
    """Steps that decoding took up, where a token takes up 1/n of a step of n tokens: shows the size of batches."""


class Progress(msgspec.Struct, frozen=True, gc=False):
    """Tokens sampled since the last report, so that a fail-over resumes at the token position.

    An engine with requests in flight, and not suspended, reports at least every `progress_interval_s`, with or without
    new tokens: silence is how a hung engine is detected.
    """

    parts: tuple[tuple[RequestId, Generated], ...]
    steps: int
    stepping_s: float = 0.0
    """Duration of its steps since the last report; 0 if the engine does not measure it."""
    recompute_s: float = 0.0
    """The part of it spent on KV invalidated by an update."""
    work: tuple[TaskWork, ...] = ()
    """Work of those steps by task; empty if the engine does not measure it. Per report and not per turn, so that it
    costs the controller next to nothing."""


class Staged(msgspec.Struct, frozen=True, gc=False):
    """Every rank holds the version, verified by digest."""

    version: Version


class StageFailed(msgspec.Struct, frozen=True, gc=False):
    """The version could not be pulled or verified. The version in service stays."""

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
    """Capabilities of an engine, reported when it joins."""

    slots: int
    """Maximum number of concurrent requests; more are queued."""
    max_context: int
    kv_on_update: KvOnUpdate = KvOnUpdate.RECOMPUTE
    sessions: bool = True
    """Keeps a session's prefix between turns."""
    progress_interval_s: float = 5.0


# --- environment ----------------------------------------------------------------------------------------------------


class Reset(msgspec.Struct, frozen=True, gc=False):
    """Start an episode in a fresh environment of the given slot; the previous one is closed.

    A slot that does not exist is answered by `EnvironmentFailed`.
    """

    episode: TrajectoryId
    slot: int
    prompt: Prompt
    member: int


class Step(msgspec.Struct, frozen=True, gc=False):
    """Act. `action` holds the tokens sampled in this turn (counted from 1); decoded beside the environment.

    For an unknown, closed or replaced episode the answer is `EnvironmentFailed`.
    """

    episode: TrajectoryId
    turn: int
    action: Segment


class Close(msgspec.Struct, frozen=True, gc=False):
    """The episode is over or abandoned: free its environment."""

    episode: TrajectoryId


EnvironmentCommand = Reset | Step | Close


class Observed(msgspec.Struct, frozen=True, gc=False):
    """The answer to `Reset` (turn 0) or to `Step` (its turn).

    `new_sequence`: the agent rewrote its history; `observation` is the whole new context.
    `truncated`: ended by one of the agent's own limits, which counts as its result.
    `transcript`: a packed `types.transcript.Transcript` if the episode ends here and one is wanted; opaque to the
    controller.
    `state`: key of the environment's current state (`types.trajectory.state_key`); empty = the observation's tokens
    identify it.
    """

    episode: TrajectoryId
    turn: int
    observation: Segment
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    new_sequence: bool = False
    transcript: bytes = b""
    state: bytes = b""


class EnvironmentFailed(msgspec.Struct, frozen=True, gc=False):
    """The environment itself failed, through no fault of the agent.

    `permanent`: its code is wrong, so that a retry would fail the same way; not set for failures an outage may cause.
    """

    episode: TrajectoryId
    turn: int
    reason: str
    permanent: bool = False


EnvironmentEvent = Observed | EnvironmentFailed


class EnvironmentInfo(msgspec.Struct, frozen=True, gc=False):
    """What an environment worker hosts."""

    task: str
    slots: int


# --- reward ---------------------------------------------------------------------------------------------------------


class EpisodeRecord(msgspec.Struct, frozen=True, gc=False):
    """One finished episode, as a reward request carries it."""

    trajectory: TrajectoryId
    seed: int
    """Seed of its prompt."""
    turn_rewards: tuple[float, ...] = ()
    truncated: bool = False
    transcript: bytes = b""
    """A packed `types.transcript.Transcript`; empty if the reward does not read it."""


class ScoreRequest(msgspec.Struct, frozen=True, gc=False):
    """Compute one reward: of one episode, or of all of a group at once.

    Stateless: the same key always means the same request.
    """

    key: str
    task: str
    reward: str
    """Name of the reward within its task."""
    episodes: tuple[EpisodeRecord, ...]
    deadline_s: float = 0.0
    """Seconds after which the answer is void; 0 = it never is."""

    @property
    def route(self) -> str:
        """Reward that a worker must list in `RewardInfo.rewards` to get this request."""
        return f"{self.task}/{self.reward}"


class Scored(msgspec.Struct, frozen=True, gc=False):
    """One finite number per episode of the request, in its order."""

    key: str
    values: tuple[float, ...]
    parts: tuple[dict[str, float], ...] = ()
    """Named parts of each value, which is their sum; empty if the function gives plain numbers."""


class ScoreFailed(msgspec.Struct, frozen=True, gc=False):
    key: str
    reason: str
    retry: bool = True
    """Whether a retry may help (429, 5xx), or would give the same answer."""


class FunctionsUsed(msgspec.Struct, frozen=True, gc=False):
    """What was used since the last report, by `ScoreRequest.route`; sent together with answers."""

    uses: dict[str, RewardUse]


RewardCommand = ScoreRequest
RewardEvent = Scored | ScoreFailed | FunctionsUsed


class RewardInfo(msgspec.Struct, frozen=True, gc=False):
    """Capabilities of a reward worker."""

    slots: int
    """Maximum number of concurrent requests. The controller never exceeds it."""
    elastic: bool = False
    """Scales with the load, down to zero: never idle, so its `slots` do not count as capacity."""
    rewards: tuple[str, ...] = ()
    """Rewards that it can compute, as `TASK/REWARD`; empty = all."""


# --- trainer --------------------------------------------------------------------------------------------------------


class Train(msgspec.Struct, frozen=True, gc=False):
    """Train on a claimed batch, in one optimiser step or several; the weights become `version`."""

    claim: ClaimId
    version: Version
    samples: tuple[TrainSample, ...]
    batches: tuple[int, ...] = ()
    """Number of the mini-batch of each sample, if these are the share of one rank (`types.rank_shares`)."""
    minibatches: int = 0
    """Number of mini-batches, if these are the share of one rank: the others get theirs directly. 0 = the whole batch.

    Only where the runtime knows the ranks; it makes the shares.
    """


class Publish(msgspec.Struct, frozen=True, gc=False):
    """Write the current weights to the store as `version`. Idempotent; an older version is refused."""

    version: Version


class Save(msgspec.Struct, frozen=True, gc=False):
    """Save the current weights and the rest of the training state durably, as the checkpoint of `version`.

    Atomic: until `Saved`, a restarted trainer finds the previous checkpoint.
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
    """A command failed; the weights are unchanged."""

    claim: ClaimId | None
    reason: str


class Saved(msgspec.Struct, frozen=True, gc=False):
    version: Version


class SaveFailed(msgspec.Struct, frozen=True, gc=False):
    """The checkpoint could not be saved, for example on a full disk. The previous one is intact."""

    version: Version
    reason: str


TrainerEvent = Trained | Published | TrainerFailed | Saved | SaveFailed


class TrainerInfo(msgspec.Struct, frozen=True, gc=False):
    """State of a trainer, reported when it joins."""

    parameters: int
    restored: Version | None = None
    """Checkpoint that it starts from; None = it starts fresh."""


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
