"""The disk of simulated trainers, which outlives them."""

from typing import NamedTuple

from rollart.types.errors import InvariantBroken
from rollart.types.versions import Version


class SimCheckpoint(NamedTuple):
    version: Version
    weights: str
    """Stands for the weights in `SimTrainer`."""


class SimCheckpoints:
    """The newest checkpoint, shared by successive trainers of a run.

    A checkpoint appears only when its save has completed: if the trainer dies during a save, the previous checkpoint
    stays. Versions only grow.
    """

    def __init__(self) -> None:
        self._newest: SimCheckpoint | None = None

    def newest(self) -> SimCheckpoint | None:
        return self._newest

    def complete(self, version: Version, weights: str) -> None:
        if self._newest is not None and version <= self._newest.version:
            raise InvariantBroken(f"a save of {version} was accepted after {self._newest.version}")
        self._newest = SimCheckpoint(version, weights)
