"""A worker that returns what it gets."""

from rollart.ports.worker import Advance
from rollart.types.ids import TrajectoryId
from rollart.types.messages import EpisodeRecord, Observed, RewardInfo, ScoreRequest
from rollart.types.tokens import EMPTY

ECHO = "echo:Echo"


class Echo:
    def __init__(self, settings, wake):  # noqa: ARG002 - it has none, and never wakes the runtime
        self._commands = []

    def info(self):
        return RewardInfo(slots=1)

    def post(self, commands):
        self._commands += commands

    def advance(self, now):  # noqa: ARG002 - nothing is timed
        commands, self._commands = self._commands, []
        return Advance(
            [Observed(TrajectoryId(0), 0, EMPTY, transcript=each.episodes[0].transcript) for each in commands], None
        )

    def close(self):
        pass


def message(number):
    """A message that comes back with this number as its transcript."""
    episode = EpisodeRecord(TrajectoryId(0), 0, transcript=str(number).encode())
    return ScoreRequest("", "t", "echo", (episode,))
