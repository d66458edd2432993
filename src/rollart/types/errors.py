"""Every error that rollart raises deliberately.

    RollartError
    ├── RequestError           the user's request is invalid (exit code 2)
    │   ├── ConfigError        …in a config file or an override; carries the key's path
    │   ├── SandboxUnavailable this machine cannot isolate commands as required
    │   └── BuildFailed        the root of a sandbox cannot be built as its Dockerfile says
    ├── RunError               the run failed (exit code 1)
    │   ├── WorkerLost         a role has no worker left
    │   ├── RuntimeLost        the host of the workers died, such as Ray's raylet
    │   ├── NoEngine           no engine can take a task's requests
    │   ├── ShareUnfilled      a task cannot fill its share of the batch
    │   ├── TaskBroken         the code of a task is wrong: every attempt fails
    │   ├── AdvantageFailed    the advantage function raised, or returned something unusable
    │   ├── CallbackFailed     the callback of the steps raised, or did not return
    │   ├── StalledRun         no progress, and no deadline left that could change that
    │   ├── Interrupted        stopped from outside (Ctrl-C, SIGTERM)
    │   └── TrainingFailed     the trainer reported an error
    │       └── TrainerLost    the trainer is gone; it restarts from its checkpoint
    ├── Fault                  a part outside the agent's control failed: an outcome, never a reward
    │   ├── EnvironmentFault
    │   │   └── SandboxFault   a sandbox could not be created or used
    │   │       ├── SandboxLost   …or was killed from outside
    │   │       └── SnapshotsFull …or cannot be kept: the disk quota is used up
    │   ├── EngineFault
    │   └── RewardFault
    ├── WeightError            a version cannot be served
    │   ├── VersionMissing
    │   ├── DigestMismatch
    │   └── UnknownDigest
    ├── FilesError             a folder of the run could not be stored, fetched or verified
    │   ├── FolderMissing
    │   └── FolderDamaged
    ├── RankError              a rank of a Cluster raised an error
    │   └── RankLost           …or its process is gone
    ├── SandboxFileError       a path in a sandbox could not be read or written: the state of its files, no failure
    ├── LinkError              a link between controller and worker was refused, or broke its protocol
    └── InvariantBroken        an invariant of the design is violated: a bug of ours, never swallowed
        └── NegativeStaleness

Messages state what failed, why, and what to do. They are for people: code uses the class, `stop_reason` and
`Fault.kind`.
"""

from typing import ClassVar

from rollart.types.failures import FailureKind, StopReason

OVERDUE = "took longer than"
"""Wording of messages about a missed deadline."""


class RollartError(Exception):
    """Base of all errors below."""

    stop_reason: ClassVar[StopReason] = StopReason.FAILED
    """Stop reason of a run that this error ends."""


class RequestError(RollartError):
    """The request was invalid; nothing was started."""


class ConfigError(RequestError):
    """A key of the configuration is invalid. `path` is the dotted key, such as `tasks.frozenlake.share`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem


class SandboxUnavailable(RequestError):
    """This machine cannot isolate commands as required; the message says what to install or allow."""


class BuildFailed(RequestError):
    """A command of a Dockerfile failed, and would again: the message has its line, and the end of its output."""


class RunError(RollartError):
    """The run cannot continue."""


class WorkerLost(RunError):
    """A role has no worker left and restarting did not help."""

    stop_reason = StopReason.WORKER_LOST


class RuntimeLost(RunError):
    """The runtime can no longer host workers: a process that it depends on died. The run can be resumed."""


class NoEngine(RunError):
    """No engine, preferred or compatible, can take the requests of a task."""

    stop_reason = StopReason.NO_ENGINE


class ShareUnfilled(RunError):
    """A task did not fill its share of the batch by its deadline, and the config makes that stop the run."""

    stop_reason = StopReason.SHARE_UNFILLED


class TaskBroken(RunError):
    """Every environment of a task, or its reward function repeatedly, failed in a way that no retry can fix."""

    stop_reason = StopReason.TASK_BROKEN


class Interrupted(RunError):
    """The run was stopped from outside; it can be resumed."""

    stop_reason = StopReason.INTERRUPTED


class AdvantageFailed(RunError):
    """The advantage function raised, or returned something other than one finite number per trajectory or turn."""


class CallbackFailed(RunError):
    """The user's callback of the steps raised, did not return in time, or returned something unknown."""


class StalledRun(RunError):
    """No progress; the message lists every wait, its owner and its age."""

    stop_reason = StopReason.STALLED


class TrainingFailed(RunError):
    """The trainer could not train a batch or publish a version."""

    stop_reason = StopReason.TRAINING_FAILED


class TrainerLost(TrainingFailed):
    """The trainer died during a command. The run recovers, unless it keeps dying."""


class Fault(RollartError):
    """A part outside the agent's control failed. It has its own outcome and never becomes a reward."""

    def __init__(self, message: str = "", kind: FailureKind = FailureKind.ERROR) -> None:
        super().__init__(message)
        self.kind = kind


class EnvironmentFault(Fault):
    """An environment could not be created, reset or stepped."""


class SandboxFault(EnvironmentFault):
    """A sandbox could not be created or used, for a reason outside the agent's reach."""


class SandboxLost(SandboxFault):
    """A sandbox, or what supervises it, was killed from outside; it must be replaced."""

    def __init__(self, message: str = "", kind: FailureKind = FailureKind.WORKER_LOST) -> None:
        super().__init__(message, kind)


class SnapshotsFull(SandboxFault):
    """The disk quota of snapshots is used up: forget some first."""


class EngineFault(Fault):
    """A generation request could not be served by any engine."""


class RewardFault(Fault):
    """A reward function failed, or returned something that is not a finite number."""


class WeightError(RollartError):
    """A weight version cannot be staged or served; the version in service stays."""


class VersionMissing(WeightError):
    """The store does not hold that version (never published, incomplete, or dropped by retention)."""


class DigestMismatch(WeightError):
    """A bucket's bytes do not match the digest in the manifest."""


class UnknownDigest(WeightError):
    """A digest is of an algorithm that this version of rollart does not know."""


class FilesError(RollartError):
    """A folder of the run was not stored or fetched: what was there before is intact."""


class FolderMissing(FilesError):
    """No complete folder has that name."""


class FolderDamaged(FilesError):
    """The contents of a folder differ from what was stored."""


class RankError(RollartError):
    """A rank of a `Cluster` raised an error."""

    def __init__(self, rank: int, node: str, cause: str) -> None:
        super().__init__(rank, node, cause)
        self.rank, self.node, self.cause = rank, node, cause

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}): {self.cause}"


class RankLost(RankError):
    """The process of a rank of a `Cluster` is gone."""


class SandboxFileError(RollartError):
    """A file of a sandbox is missing, too large, not a regular file, or may not be accessed by its user."""


class LinkError(RollartError):
    """A link between controller and worker was refused, or broke its protocol. It is closed: the worker's death."""


class InvariantBroken(RollartError):
    """An invariant was about to be violated. Always a bug of rollart; the run stops rather than train on it."""

    stop_reason = StopReason.INVARIANT_BROKEN


class NegativeStaleness(InvariantBroken):
    """A token carries a version newer than the one in service: a fail-over reset a version, which may only grow."""


WRONG_CODE = (AttributeError, ImportError, NameError, NotImplementedError, SyntaxError, TypeError)
"""Exceptions of an environment or reward function that mean its code is wrong: a retry would fail the same way."""
