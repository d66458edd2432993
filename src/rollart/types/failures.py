"""Why a run stopped and how a trajectory failed, as enums; the journal has human-readable text beside them."""

import enum


class StopReason(enum.Enum):
    """Why a run ended."""

    DONE = "done"
    """All steps were trained, or `on_step` ended the run after one."""
    INTERRUPTED = "interrupted"
    """Stopped from outside (Ctrl-C, SIGTERM, cancellation); it can be resumed."""
    WORKER_LOST = "worker_lost"
    """A role has no worker left."""
    NO_ENGINE = "no_engine"
    """No engine could take the requests of a task."""
    SHARE_UNFILLED = "share_unfilled"
    """A task did not fill its share of the batch by its deadline."""
    TASK_BROKEN = "task_broken"
    """The code of an environment or a reward function is wrong."""
    TRAINING_FAILED = "training_failed"
    """The trainer reported an error, or was lost too often."""
    STALLED = "stalled"
    """No progress, and no wait that could end: a bug of rollart."""
    INVARIANT_BROKEN = "invariant_broken"
    """An invariant was about to be violated: a bug of rollart."""
    FAILED = "failed"
    """Any other error."""


class FailureKind(enum.Enum):
    """How the part named by a trajectory's outcome (environment, engine or reward) failed."""

    DEADLINE = "deadline"
    """It did not answer in time."""
    WORKER_LOST = "worker_lost"
    """The worker that it ran on died."""
    ERROR = "error"
    """It reported an error."""
    INVALID = "invalid"
    """It returned something unusable, such as a reward that is not a finite number."""
