"""Trajectories, groups and how they end."""

import enum
import hashlib
from array import array
from typing import Any

import msgspec

from rollart.types.ids import GroupId, PromptId, TrajectoryId
from rollart.types.tokens import TokenSequence
from rollart.types.versions import Version


class Purpose(enum.Enum):
    """Why a trajectory is made. Both pass through the same control plane."""

    TRAIN = "train"
    EVAL = "eval"


class Outcome(enum.Enum):
    """How a started trajectory ended: exactly one of these."""

    COMPLETED = "completed"
    """The environment ended the episode and the reward arrived."""
    TRUNCATED = "truncated"
    """The agent ran into a limit of its own (turns, tokens, its sandbox); a result like any other."""
    STALE = "stale"
    """It fell behind the staleness bound."""
    REDUNDANT = "redundant"
    """Enough others finished first."""
    ENV_FAILED = "env_failed"
    """Its environment failed; never a reward."""
    ENGINE_FAILED = "engine_failed"
    """No engine could go on with it."""
    REWARD_FAILED = "reward_failed"
    """Its reward could not be had."""
    CANCELLED = "cancelled"
    """The run ended, its group failed, or a roll-back voided it."""


TRAINABLE = frozenset({Outcome.COMPLETED, Outcome.TRUNCATED})


class GroupOutcome(enum.Enum):
    """How an opened group ended: exactly one of these."""

    TRAINED = "trained"
    """Its batch was trained."""
    FILTERED = "filtered"
    """The accept hook refused it (no signal in it, say). Its prompt is spent."""
    REDUNDANT = "redundant"
    """Enough other groups finished first. Its prompt is queued again."""
    STALE = "stale"
    """Its oldest member fell behind the staleness bound. Its prompt is queued again."""
    FAILED = "failed"
    """Too many of its members failed. Its prompt is queued again a few times, then set aside."""
    CANCELLED = "cancelled"
    """The run ended or was rolled back. Its prompt is queued again."""
    EVALUATED = "evaluated"
    """An evaluation: its trajectory was scored, nothing is trained."""


class StaleTreatment(enum.Enum):
    """What happens to a trajectory past the staleness bound."""

    ABORT = "abort"
    """It ends as `stale`, and its group with it."""
    MASK = "mask"
    """It finishes; its tokens are not trained, its reward stays in the group's baseline."""


class Prompt(msgspec.Struct, frozen=True):
    """One item of a prompt source: what an environment is reset with."""

    id: PromptId
    task: str
    seed: int
    data: dict[str, Any] = {}


class Ticket(msgspec.Struct, frozen=True):
    """A prompt with its history: how often a group was opened for it, and which member numbers are used up.

    Member numbers are never reused for a ticket, so a replacement is a new sample and not the same failure again.
    """

    number: int
    prompt: Prompt
    attempt: int = 0
    failures: int = 0
    next_member: int = 0

    def again(self, next_member: int, *, failed: bool) -> "Ticket":
        """The ticket after a group of this prompt came to nothing."""
        return Ticket(self.number, self.prompt, self.attempt + 1, self.failures + int(failed), next_member)


STATE_BYTES = 8


def state_key(seen: bytes) -> bytes:
    """A key for the state of an environment, from what is seen of it: equal states have equal keys."""
    return hashlib.blake2b(seen, digest_size=STATE_BYTES).digest()


class StateKeys:
    """Keys of states in order, in one buffer: ten thousand trajectories keep one per turn."""

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys = bytearray()

    def append(self, seen: bytes) -> None:
        """The next state, by what is seen of it."""
        self._keys += state_key(seen)

    def first(self, count: int) -> list[bytes]:
        keys = bytes(self._keys[: count * STATE_BYTES])
        return [keys[start : start + STATE_BYTES] for start in range(0, len(keys), STATE_BYTES)]


class Trajectory:
    """The record of one attempt at one member of a group; owned by its EnvManager until it ends, then read only.

    Most trajectories have one sequence. An agent that rewrites its history (a new context, a compaction) opens another.
    """

    __slots__ = (
        "artifact",
        "attempt",
        "first_version",
        "group",
        "id",
        "last_version",
        "masked",
        "member",
        "outcome",
        "prompt",
        "purpose",
        "reward",
        "sequence",
        "sequences",
        "states",
        "task",
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
        """The sequence that grows."""
        self.sequences = [self.sequence]
        self.turns = 0
        self.turn_rewards: list[float] = []
        self.turn_tokens = array("i")
        """How many tokens each turn sampled: the only thing that says where a turn ends in the sequences."""
        self.states = StateKeys() if keeps_states else None
        """The state that each turn started in; None where no algorithm asks."""
        self.reward: float | None = None
        self.artifact: bytes = b""
        self.first_version: Version | None = None
        self.last_version: Version | None = None
        self.truncated = False
        self.masked = False
        self.outcome: Outcome | None = None

    def open_sequence(self) -> None:
        """What comes is a new context."""
        self.sequence = TokenSequence()
        self.sequences.append(self.sequence)

    @property
    def sampled_tokens(self) -> int:
        return sum(sequence.sampled for sequence in self.sequences)


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one turn sampled, how well it did, and what it earned."""

    tokens: int
    advantage: float = 0.0
    """0 where the trainer computes it, from values of its own."""
    reward: float = 0.0
    """A reward for the episode as a whole is in that of the last turn."""


class TrainSample(msgspec.Struct, frozen=True):
    """One trajectory of a batch, as the trainer gets it: by reference inside a process.

    The tokens of its turns, one after the other, are the sampled tokens of its sequences. A masked sample takes part in
    nothing but its group's baseline, which is already in everybody's advantage.
    """

    trajectory: TrajectoryId
    group: GroupId
    task: str
    sequences: tuple[TokenSequence, ...]
    turns: tuple[Turn, ...]
    reward: float
    masked: bool = False
    truncated: bool = False
