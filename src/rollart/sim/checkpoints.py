"""The disk that a simulated trainer saves to: what is left of it when it is gone."""

from typing import NamedTuple

from rollart.types.errors import InvariantBroken
from rollart.types.versions import Version


class SimCheckpoint(NamedTuple):
    version: Version
    weights: str
    """What stands for the weights in `SimTrainer`."""


class SimCheckpoints:
    """The newest checkpoint, shared by the trainers that follow one another.

    A checkpoint is here when its save has ended and not before: of a trainer that goes in the middle of one, the
    checkpoint before it stays. Versions only grow.
    """

    def __init__(self) -> None:
        self._newest: SimCheckpoint | None = None

    def newest(self) -> SimCheckpoint | None:
        return self._newest

    def complete(self, version: Version, weights: str) -> None:
        if self._newest is not None and version <= self._newest.version:
            raise InvariantBroken(f"a save of {version} was let through after {self._newest.version}")
        self._newest = SimCheckpoint(version, weights)
