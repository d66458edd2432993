"""Every error that rollart raises on purpose.

    RollartError
    ├── RequestError           the user asked for something that cannot be (exit code 2)
    │   └── ConfigError        …in a config file or an override; carries the key's path
    ├── RunError               the run failed (exit code 1)
    │   ├── WorkerLost         a role has no worker left
    │   ├── NoEngine           no engine can take a task's requests
    │   ├── ShareUnfilled      a task cannot fill its share of the batch
    │   ├── TaskBroken         the code of a task is wrong: all that it can answer is refused
    │   ├── StalledRun         nothing moves and no deadline is left to change that
    │   ├── Interrupted        somebody stopped it (Ctrl-C, SIGTERM)
    │   └── TrainingFailed     the trainer reported an error
    │       └── TrainerLost    the trainer is gone; it starts again from its checkpoint
    ├── Fault                  a part outside the agent's reach failed: an outcome, never a reward
    │   ├── EnvironmentFault
    │   ├── EngineFault
    │   └── RewardFault
    ├── WeightError            a version cannot be served
    │   ├── VersionMissing
    │   └── DigestMismatch
    └── InvariantBroken        a rule of the design does not hold: a bug of ours, never swallowed
        └── NegativeStaleness

A message says what failed, why, and what to do.
"""

OVERDUE = "took longer than"
"""How the cause of whatever ended at a deadline reads; who looks for hangs in a journal looks for this."""


class RollartError(Exception):
    """Base of all errors below."""


class RequestError(RollartError):
    """The request was wrong; nothing was started."""


class ConfigError(RequestError):
    """A key of the configuration is wrong. `path` is the dotted key, such as `tasks.frozenlake.share`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem


class RunError(RollartError):
    """The run cannot go on."""


class WorkerLost(RunError):
    """A role has no worker left and restarting did not help."""


class NoEngine(RunError):
    """No engine, preferred or compatible, can take the requests of a task."""


class ShareUnfilled(RunError):
    """A task did not fill its share of the batch by its deadline, and the config says that this stops the run."""


class TaskBroken(RunError):
    """Every environment of a task, or its reward function time and again, failed in a way that no retry mends."""


class Interrupted(RunError):
    """The run was stopped from outside; it can be resumed."""


class StalledRun(RunError):
    """Nothing moves; the message names every wait, its owner and its age."""


class TrainingFailed(RunError):
    """The trainer could not train a batch or publish a version."""


class TrainerLost(TrainingFailed):
    """The trainer died under a command. Recovered from, unless it keeps dying."""


class Fault(RollartError):
    """Something outside the agent's reach failed. Ends in an outcome of its own and never in a reward."""


class EnvironmentFault(Fault):
    """An environment could not be created, reset or stepped."""


class EngineFault(Fault):
    """A generation request could not be served by any engine."""


class RewardFault(Fault):
    """A reward function failed, or answered with something that is not a finite number."""


class WeightError(RollartError):
    """A weight version cannot be staged or served; the version in service stays."""


class VersionMissing(WeightError):
    """The store does not hold that version (never published, cut halfway, or dropped by retention)."""


class DigestMismatch(WeightError):
    """A bucket's bytes are not those the manifest promises."""


class InvariantBroken(RollartError):
    """A rule of the design was about to be broken. Always a bug of rollart; the run stops rather than train on it."""


class NegativeStaleness(InvariantBroken):
    """A token carries a version newer than the one in service: a fail-over reset a version that may only grow."""


WRONG_CODE = (AttributeError, ImportError, NameError, NotImplementedError, SyntaxError, TypeError)
"""Raised by an environment or a reward function, these say that its code is wrong: the same would happen again."""
