"""Figures of automatic hardware affinity: the inputs of a decision, so that the journal suffices to recompute it.

For one mix of work, by default 1,000 turns in the proportions of the run, a row has the engine-seconds that one task
would cost on one hardware class:

    prefill_s   prompts and recomputed KV
    decode_s    the part of decoding that grows with the tokens
    fixed_s     the part of a decoding step that does not depend on its batch (reading the weights), for every token:
                divided by the batch, because a step serves the whole batch

The load of a class with the tasks T, E engines and S slots each, where the tasks have n requests in flight:

    load = (Σ prefill_s + Σ decode_s + Σ fixed_s / B) / E        B = Σ n / E, at least 1 and at most S

The score of an assignment, which decisions minimise, is the root mean square of the load over all engines. It lies
between the highest load, which matters where engines never wait for anything else, and the mean, which is the cost of
the work.
"""

import enum

import msgspec


class WorkCost(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Cost of a task's part of the mix on a hardware class; see the module."""

    task: str
    hardware: str
    prefill_s: float
    decode_s: float
    fixed_s: float
    in_flight: float
    """Requests of the task in flight, on average: what it adds to the batches of its class."""


class ClassSize(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Engines of a hardware class, and slots of each."""

    hardware: str
    engines: int
    slots: int


class AffinityFigures(msgspec.Struct, frozen=True, gc=False):
    """Everything that a decision depends on."""

    classes: tuple[ClassSize, ...]
    costs: tuple[WorkCost, ...]
    """Costs of tasks that can be assigned, one row per measured class."""
    pinned: tuple[WorkCost, ...] = ()
    """Costs of all other tasks, on the classes where they run now."""


class AffinityCause(enum.StrEnum):
    """Why tasks were assigned."""

    MEASURED = "measured"
    """Their costs are known on every class for the first time."""
    GAIN = "gain"
    """Another assignment has been better by the required gain for the required time."""
    LOST = "lost"
    """Their class has had no engine for the required time."""


class AffinityRules(msgspec.Struct, frozen=True, gc=False):
    """Rules of automatic affinity, as journalled; see `config.schema.AffinitySettings`."""

    classes: dict[str, tuple[str, ...]]
    """Hardware classes that each automatic task can use."""
    declared: dict[str, str]
    """Tasks with a declared class."""
    pools: dict[str, str]
    """Hardware class of every pool of engines."""
    explore: float
    min_gain: float
    confirm_s: float
    hold_s: float
    tick_s: float
    """Seconds between two evaluations of the figures."""
