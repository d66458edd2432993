"""When a task itself is to blame: its code is wrong, and no retry, back-off or other worker will mend that.

What failed in a way that says so is counted by part (an environment slot, a reward question) since anything of the task
last succeeded. One part proves nothing, because what the agent said may have led there; when all parts have failed and
nothing has succeeded in between, it is the task.

    >>> blame = Blame()
    >>> [blame.failed("maze", slot, parts=3) for slot in ("slot 0", "slot 0", "slot 1", "slot 2")]
    [False, False, False, True]
"""

LEAST_FAILURES = 3
"""A task with one or two environments has so many tries."""


class Blame:
    """Failures of every task since its last success."""

    def __init__(self) -> None:
        self._failures: dict[str, dict[str, int]] = {}

    def succeeded(self, task: str) -> None:
        self._failures.pop(task, None)

    def failed(self, task: str, part: str, parts: int) -> bool:
        """A part failed in a way that blames the task; whether all `parts` have by now."""
        failures = self._failures.setdefault(task, {})
        failures[part] = failures.get(part, 0) + 1
        return len(failures) >= parts and sum(failures.values()) >= LEAST_FAILURES
