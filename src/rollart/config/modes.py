"""The five modes: settings of the same policies, never separate pipelines.

mode       environments   reward      training      at an update       staleness checked   affinity
sync       batch barrier  at the end  after rollout  drain              (always 0)          off
sync_plus  per trajectory at once     after rollout  drain              (always 0)          off
one_off    per trajectory at once     beside rollout drain              (always 0)          off
areal      per trajectory at once     beside rollout interrupt, go on   at the start        off
rollart    per trajectory at once     beside rollout interrupt, go on   at every turn       on
"""

import enum

from rollart.config.base import Strict


class Mode(enum.StrEnum):
    """How the stages of a step are arranged in time; see the table above."""

    SYNC = "sync"
    SYNC_PLUS = "sync_plus"
    ONE_OFF = "one_off"
    AREAL = "areal"
    ROLLART = "rollart"


class ModeSettings(Strict):
    """What a mode means to the policies."""

    environment_barrier: bool
    """All environments of a batch take their turns together."""
    reward_after_rollout: bool
    """Rewards are computed when the last episode of the batch is over, instead of when each one is."""
    overlap: bool
    """Training runs beside rollout."""
    interrupt: bool
    """At an update trajectories in flight are interrupted and go on with the new weights; else all end before it."""
    check_every_turn: bool
    """The staleness bound holds at every turn and at the claim; otherwise it only limits what is started."""
    affinity: bool
    """Tasks go to the hardware class that they name."""


MODES: dict[Mode, ModeSettings] = {
    Mode.SYNC: ModeSettings(
        environment_barrier=True,
        reward_after_rollout=True,
        overlap=False,
        interrupt=False,
        check_every_turn=True,
        affinity=False,
    ),
    Mode.SYNC_PLUS: ModeSettings(
        environment_barrier=False,
        reward_after_rollout=False,
        overlap=False,
        interrupt=False,
        check_every_turn=True,
        affinity=False,
    ),
    Mode.ONE_OFF: ModeSettings(
        environment_barrier=False,
        reward_after_rollout=False,
        overlap=True,
        interrupt=False,
        check_every_turn=True,
        affinity=False,
    ),
    Mode.AREAL: ModeSettings(
        environment_barrier=False,
        reward_after_rollout=False,
        overlap=True,
        interrupt=True,
        check_every_turn=False,
        affinity=False,
    ),
    Mode.ROLLART: ModeSettings(
        environment_barrier=False,
        reward_after_rollout=False,
        overlap=True,
        interrupt=True,
        check_every_turn=True,
        affinity=True,
    ),
}
