"""Figures of elastic pools: the inputs of a decision to resize one.

For each training step, from the worker-seconds of `types.journal.PoolTime`:

    wait  = trainer's seconds idle for rollout / all of its seconds
    busy  = engines' busy seconds / (all of their seconds − those idle for training or a weight sync)
    idle  = engines' seconds idle for training / all of their seconds

With n engines, the bound `min_wait` and the last `confirm_steps` steps taken together:

    more engines     wait ≥ min_wait and busy ≥ BUSY in each step:
                     n' = ⌈n / (1 − wait)⌉, at most 2n, the requests in flight, `max` and what the nodes have room for
    fewer engines    idle ≥ min_wait and wait < min_wait / 2 in each step:
                     n' = ⌈busy engines / (1 − min_wait / 2)⌉, at least n / 2, `min` and 1
"""

import enum

import msgspec

BUSY = 0.8
"""Minimum busy share at which a pool grows: idle engines would gain nothing from more."""


class ElasticCause(enum.StrEnum):
    """Why the number of a pool's engines changed."""

    NODES = "nodes"
    """Its nodes have had room for more engines, or for fewer, for the required time."""
    ROLLOUT = "rollout"
    """The trainer waited for rollout."""
    TRAINING = "training"
    """Its engines waited for training."""
    TRAINER = "trainer"
    """The trainer has had no node for the required time, and its engines are on nodes that would do."""
    FAILED = "failed"
    """Engines that kept dying were removed, and there were fewer than the minimum."""


class ElasticPool(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bounds of a pool's number of engines."""

    min: int
    max: int
    start: int


class ElasticRules(msgspec.Struct, frozen=True, gc=False):
    """Rules of elastic pools, as journalled; see `config.elasticity.ElasticitySettings`."""

    pools: dict[str, ElasticPool]
    min_wait: float
    confirm_steps: int
    confirm_s: float
    hold_s: float
    tick_s: float
    """Seconds between two evaluations of the figures."""
    drain_s: float
    """Time that a removed engine has to finish its requests."""


class ElasticFigures(msgspec.Struct, frozen=True, gc=False):
    """What a change was decided from; see the module. Shares are 0 if no step counted."""

    room: int | None = None
    """Engines that the nodes have room for, those running included; None where nothing is reserved."""
    wait: float = 0.0
    busy: float = 0.0
    idle: float = 0.0
    busy_engines: float = 0.0
    """Average number of engines with requests."""
    in_flight: float = 0.0
    """Average number of requests at engines of the pool."""
    steps: int = 0
    """Number of steps that the shares are of."""
