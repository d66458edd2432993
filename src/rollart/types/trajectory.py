"""Trajectories, groups and their outcomes."""

import enum
import hashlib
from array import array
from typing import Any

import msgspec

from rollart.types.failures import FailureKind
from rollart.types.ids import GroupId, PromptId, TrajectoryId
from rollart.types.rewards import RewardSheet
from rollart.types.tokens import EMPTY, TokenSequence
from rollart.types.versions import Version


class Purpose(enum.Enum):
    """What a trajectory is for. Both kinds pass through the same control plane."""

    TRAIN = "train"
    EVAL = "eval"


class Outcome(enum.Enum):
    """How a started trajectory ended: exactly one of these."""

    COMPLETED = "completed"
    """The environment ended the episode and the reward arrived."""
    TRUNCATED = "truncated"
    """The agent reached one of its own limits (turns, tokens, its sandbox); a result like any other."""
    STALE = "stale"
    """It exceeded the staleness bound, or was replaced because it would have."""
    REDUNDANT = "redundant"
    """Enough others finished first."""
    ENV_FAILED = "env_failed"
    """Its environment failed; never a reward."""
    ENGINE_FAILED = "engine_failed"
    """No engine could continue it."""
    REWARD_FAILED = "reward_failed"
    """Its reward could not be computed."""
    CANCELLED = "cancelled"
    """The run ended, its group failed, or a roll-back voided it."""


TRAINABLE = frozenset({Outcome.COMPLETED, Outcome.TRUNCATED})
"""Outcomes that are results."""
FAILURES = frozenset({Outcome.ENV_FAILED, Outcome.ENGINE_FAILED, Outcome.REWARD_FAILED})
"""Outcomes that the agent did not cause; never a reward."""


class GroupOutcome(enum.Enum):
    """How an opened group ended: exactly one of these."""

    TRAINED = "trained"
    """Its batch was trained."""
    FILTERED = "filtered"
    """It has no learning signal (for example, all rewards are equal). Its prompt is consumed."""
    REDUNDANT = "redundant"
    """Enough other groups finished first. Its prompt is requeued."""
    STALE = "stale"
    """Its members exceeded the staleness bound. Its prompt is requeued, ahead of others."""
    FAILED = "failed"
    """Too many of its members failed, or it exceeded a staleness bound of its own. Its prompt is requeued a few times
    in the first case, then set aside."""
    CANCELLED = "cancelled"
    """The run ended or was rolled back. Its prompt is requeued."""
    EVALUATED = "evaluated"
    """An evaluation: its trajectory was scored, nothing is trained."""


class StaleTreatment(enum.Enum):
    """What happens to a trajectory past the staleness bound."""

    ABORT = "abort"
    """It ends as `stale`. Its group goes on with the others, if any are left."""
    MASK = "mask"
    """It finishes; its tokens are not trained, its reward stays in the group's baseline."""


class Prompt(msgspec.Struct, frozen=True):
    """One item of a prompt source; an environment is reset with it."""

    id: PromptId
    task: str
    seed: int
    data: dict[str, Any] = {}


class Ticket(msgspec.Struct, frozen=True):
    """A prompt with its history: how many groups were opened for it, and which member numbers were used.

    Member numbers are never reused for a ticket, so a replacement is a new sample and not the same failure again.
    """

    number: int
    prompt: Prompt
    attempt: int = 0
    failures: int = 0
    next_member: int = 0
    losses: int = 0
    """Updates at which its groups lost members to the staleness bound. A prompt with losses goes first."""

    def again(self, next_member: int, *, failed: bool, lost: int = 0) -> "Ticket":
        """The ticket after a group of this prompt was not trained."""
        return Ticket(
            self.number, self.prompt, self.attempt + 1, self.failures + int(failed), next_member, self.losses + lost
        )


STATE_BYTES = 8


def state_key(seen: bytes) -> bytes:
    """Key of an environment's state, derived from what is visible of it: equal states have equal keys."""
    return hashlib.blake2b(seen, digest_size=STATE_BYTES).digest()


class StateKeys:
    """State keys in order, in one buffer: ten thousand trajectories keep one per turn."""

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys = bytearray()

    def append(self, seen: bytes) -> None:
        """Append the next state, given what is visible of it."""
        self._keys += state_key(seen)

    def first(self, count: int) -> list[bytes]:
        keys = bytes(self._keys[: count * STATE_BYTES])
        return [keys[start : start + STATE_BYTES] for start in range(0, len(keys), STATE_BYTES)]


class Trajectory:
    """Record of one attempt at one member of a group; owned by its Episode until it ends, then read only.

    Most trajectories have one sequence. An agent that rewrites its history (a new context, a compaction) opens another.
    """

    __slots__ = (
        "attempt",
        "failure",
        "first_version",
        "group",
        "id",
        "last_observation",
        "last_version",
        "masked",
        "member",
        "outcome",
        "prompt",
        "purpose",
        "reward",
        "rewards",
        "sequence",
        "sequences",
        "states",
        "task",
        "transcript",
        "truncated",
        "turn_rewards",
        "turn_tokens",
        "turns",
    )

    def __init__(
        self,
        *,
        id: TrajectoryId,
        group: GroupId,
        member: int,
        attempt: int,
        task: str,
        purpose: Purpose,
        prompt: Prompt,
        keeps_states: bool = False,
    ) -> None:
        self.id = id
        self.group = group
        self.member = member
        self.attempt = attempt
        self.task = task
        self.purpose = purpose
        self.prompt = prompt
        self.sequence = TokenSequence()
        """The current sequence, which is appended to."""
        self.sequences = [self.sequence]
        self.turns = 0
        self.turn_rewards: list[float] = []
        self.turn_tokens = array("i")
        """Number of tokens sampled per turn: the only record of turn boundaries in the sequences."""
        self.states = StateKeys() if keeps_states else None
        """State at the start of each turn; None if no algorithm needs it."""
        self.reward: float | None = None
        self.rewards: RewardSheet | None = None
        """Its rewards by name, from the end of its episode on."""
        self.transcript: bytes = b""
        """The packed transcript, from the end of its episode until its rewards are in and it has ended."""
        self.last_observation = EMPTY
        """Observation after the last action of an episode that ended by itself: for display while the trajectory ends,
        not part of any sequence."""
        self.first_version: Version | None = None
        self.last_version: Version | None = None
        self.truncated = False
        self.masked = False
        self.outcome: Outcome | None = None
        self.failure: FailureKind | None = None
        """How it failed, if its outcome is a failure."""

    def open_sequence(self) -> None:
        """Start a new context."""
        self.sequence = TokenSequence()
        self.sequences.append(self.sequence)

    @property
    def sampled_tokens(self) -> int:
        return sum(sequence.sampled for sequence in self.sequences)


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens, advantage and reward of one turn."""

    tokens: int
    advantage: float = 0.0
    """0 if the trainer computes it from its own values."""
    reward: float = 0.0
    """A reward for the whole episode is part of the last turn's."""


class TrainSample(msgspec.Struct, frozen=True):
    """One trajectory of a batch, as passed to the trainer: by reference within a process.

    The tokens of its turns, concatenated, are the sampled tokens of its sequences. A masked sample contributes only to
    its group's baseline, which is already part of every member's advantage.
    """

    trajectory: TrajectoryId
    group: GroupId
    task: str
    sequences: tuple[TokenSequence, ...]
    turns: tuple[Turn, ...]
    reward: float
    masked: bool = False
    truncated: bool = False
