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
    """Policy settings of a mode."""

    environment_barrier: bool
    """All environments of a batch take their turns together."""
    reward_after_rollout: bool
    """Rewards are computed after the last episode of the batch, instead of after each episode."""
    overlap: bool
    """Training runs concurrently with rollout."""
    interrupt: bool
    """An update interrupts trajectories in flight, which continue with the new weights; otherwise rollout drains."""
    check_every_turn: bool
    """The staleness bound is enforced at every turn and at the claim; otherwise only at the start of a trajectory."""
    affinity: bool
    """Tasks run on their preferred hardware class."""


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
