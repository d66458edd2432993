"""Weight versions and staleness.

Versions only grow. Every start of a trainer begins a new epoch, so a restarted trainer can never publish a version that
an older one published too. `step` counts optimiser steps of the surviving lineage: after a roll-back to a checkpoint of
step k the next epoch starts at step k again.
"""

import msgspec

from rollart.types.errors import NegativeStaleness


class Version(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A version of the policy's weights, ordered by (epoch, step)."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"v{self.epoch}.{self.step}"


def steps_between(newer: Version, older: Version) -> int:
    """Optimiser steps from `older` to `newer`.

    >>> steps_between(Version(0, 3), Version(0, 1))
    2
    """
    steps = newer.step - older.step
    if steps < 0 or newer.epoch < older.epoch:
        raise NegativeStaleness(
            f"{older} is newer than {newer}: a version went backwards. "
            "This is a bug of rollart; keep the run folder and report it with the journal."
        )
    return steps
