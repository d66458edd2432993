"""Work of an engine by task, for its reports: what `policy.affinity_costs` learns from."""

from rollart.types.messages import TaskWork


class _Totals:
    __slots__ = ("decode_s", "decode_steps", "decode_tokens", "prefill_s", "prefill_tokens", "turns")

    def __init__(self) -> None:
        self.turns = self.prefill_tokens = self.decode_tokens = 0
        self.prefill_s = self.decode_s = self.decode_steps = 0.0


class WorkMeter:
    """Sums since the last report."""

    def __init__(self) -> None:
        self._tasks: dict[str, _Totals] = {}

    def prefilled(self, task: str, tokens: int, seconds: float) -> None:
        """Prompt tokens were computed, in this share of a step."""
        totals = self._of(task)
        totals.prefill_tokens += tokens
        totals.prefill_s += seconds

    def decoded(self, task: str, seconds: float, step_share: float) -> None:
        """A token was computed that decoding sampled before, in this share of a step."""
        totals = self._of(task)
        totals.decode_tokens += 1
        totals.decode_s += seconds
        totals.decode_steps += step_share

    def ended(self, task: str) -> None:
        """A turn ended by itself."""
        self._of(task).turns += 1

    def take(self) -> tuple[TaskWork, ...]:
        """The sums, which start again from zero."""
        taken = tuple(
            TaskWork(
                task,
                totals.turns,
                totals.prefill_tokens,
                totals.prefill_s,
                totals.decode_tokens,
                totals.decode_s,
                totals.decode_steps,
            )
            for task, totals in self._tasks.items()
        )
        self._tasks.clear()
        return taken

    def _of(self, task: str) -> _Totals:
        totals = self._tasks.get(task)
        if totals is None:
            totals = self._tasks[task] = _Totals()
        return totals
