"""The staleness bound and the timeline that follows from it.

Staleness of a trajectory = steps between the version that the engines serve when its batch is claimed and the version
of its first sampled token. A group is as stale as its oldest member. The training lag is measured against the weights
that the batch is about to train; where training overlaps rollout it is one more.

In every mode, claim k trains version k into version k + 1. Where training overlaps rollout, the engines take version k
right after claim k, so they serve version k - 1 at the claim (version 0 at claims 0 and 1):

    rollart, alpha = 1
    claim   engines serve   first tokens of    staleness   training lag
    0       0               0                  0           0
    1       0               0                  0           1
    2       1               0 1                1 0         2 1
    3       2               1 2                1 0         2 1

    rollart, alpha = 0
    claim   engines serve   first tokens of    staleness   training lag
    0       0               0                  0           0
    1       0               0                  0           1
    2       1               1                  0           1
    3       2               2                  0           1

    rollart, alpha = 2
    claim   engines serve   first tokens of    staleness   training lag
    0       0               0                  0           0
    1       0               0                  0           1
    2       1               0 1                1 0         2 1
    3       2               0 1 2              2 1 0       3 2 1

`areal` has the timeline of `rollart` for trajectories started in time, but it also finishes everything it started, so
its staleness is reported and not bounded. `one_off` drains before every update, so every alpha gives the timeline of
rollart with alpha = 0. `sync` and `sync_plus` train before they roll out again:

    sync, any alpha
    claim   engines serve   first tokens of    staleness   training lag
    0       0               0                  0           0
    1       1               1                  0           0
    2       2               2                  0           0
    3       3               3                  0           0

The tables above are checked against `timeline` and against simulated runs.
"""

from typing import NamedTuple

from rollart.config.modes import ModeSettings
from rollart.types.versions import Version, steps_between


class ClaimTime(NamedTuple):
    """One row of the tables above: what claim number `claim` may hold."""

    claim: int
    served: int
    first: tuple[int, ...]
    staleness: tuple[int, ...]
    lag: tuple[int, ...]


def timeline(mode: ModeSettings, alpha: int, claims: int) -> list[ClaimTime]:
    """What every claim may hold, with versions given as steps."""
    rows = []
    for claim in range(claims):
        served = max(0, claim - 1) if mode.overlap else claim
        oldest = max(0, served - alpha) if mode.interrupt else served
        first = tuple(range(oldest, served + 1))
        rows.append(
            ClaimTime(
                claim, served, first, tuple(served - step for step in first), tuple(claim - step for step in first)
            )
        )
    return rows


class StalenessBound(NamedTuple):
    """The bound, checked at every turn, at every update and at the claim."""

    alpha: int
    check_every_turn: bool

    def violated(self, served: Version, first: Version | None) -> bool:
        """Whether a trajectory or group with its first token of `first` may not continue, or be claimed, at `served`.

        Without a token there is no age. Raises `NegativeStaleness` for a token newer than `served`.
        """
        if first is None:
            return False
        return steps_between(served, first) > self.alpha and self.check_every_turn

    def claims_left(self, served: Version, first: Version | None) -> int | None:
        """Number of claims, the next one included, that may still hold it; None if any may.

        1 is its last chance: the update after the next claim puts it past the bound.
        """
        if first is None or not self.check_every_turn:
            return None
        return self.alpha - steps_between(served, first) + 1
