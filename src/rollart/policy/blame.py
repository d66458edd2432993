"""Detection of broken tasks: the task's own code is wrong, and no retry, back-off or other worker will help.

Failures that point at the task are counted per part (an environment slot, a reward request) since the task's last
success. A single failing part proves nothing, because the agent's own actions may have caused it; once all parts have
failed without a success in between, the task is to blame.

    >>> blame = Blame()
    >>> [blame.failed("maze", slot, parts=3) for slot in ("slot 0", "slot 0", "slot 1", "slot 2")]
    [False, False, False, True]
"""

LEAST_FAILURES = 3
"""Minimum number of failures before a task is blamed; matters for tasks with one or two environments."""


class Blame:
    """Failures per task since its last success."""

    def __init__(self) -> None:
        self._failures: dict[str, dict[str, int]] = {}

    def succeeded(self, task: str) -> None:
        self._failures.pop(task, None)

    def failed(self, task: str, part: str, parts: int) -> bool:
        """Record a failure that points at the task; returns whether all `parts` have failed by now."""
        failures = self._failures.setdefault(task, {})
        failures[part] = failures.get(part, 0) + 1
        return len(failures) >= parts and sum(failures.values()) >= LEAST_FAILURES
