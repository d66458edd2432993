"""Estimates for automatic affinity: what each task costs on each hardware class, from the reports of engines.

Per task and class: seconds per prompt token and per sampled token, with exponential decay (`COST_S`), so that a class
that changed its speed is noticed. How much work of each kind a task brings is summed over all classes and decays with
the training steps, so that it reflects whole batches.

The seconds of a decoding step depend on its batch: an idle engine looks slow per token, because one token pays for the
whole step. So they are split, per class, into a part per step and a part per token: a weighted linear regression of
the seconds per token on the tokens per step,

    seconds / token = fixed · steps / token + marginal

which predicts the cost of a token in another batch. While batch sizes do not vary, most of it is assumed fixed
(`FIXED_SHARE`): too optimistic for a class that is only measured idle, which corrects itself once it has work.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollart.types.affinity import WorkCost
from rollart.types.messages import TaskWork

COST_S = 60.0
"""Time constant of costs."""
FRESH_S = 180.0
"""Time constant of evidence: an estimate is old two minutes after the last report, ..."""
FRESH_STEPS = 4.0
"""... or after this many training steps, if that is longer: trajectories on a slow class are stragglers."""
SPLIT_S = 300.0
"""Time constant of the regression."""
ENOUGH = 4.0
"""Turns, or multiples of `PIECE_TOKENS` sampled tokens, after which a cost counts as known."""
PIECE_TOKENS = 512
MIX_KEEP = 0.75
"""Share of the mix that a training step leaves."""
MIX_TURNS = 1000.0
"""Number of turns that costs are normalised to."""
FIXED_SHARE = 0.8
"""Assumed share of the fixed part, as long as the size of batches has not varied."""
TRUST = 0.02
"""Relative variance of batch sizes at which the measured split weighs as much as the assumed one."""


class _Split(NamedTuple):
    """Seconds of decoding: per step, and per token."""

    fixed: float
    marginal: float


class _Class:
    """The regression for one hardware class: sums weighted by tokens."""

    __slots__ = ("at", "cost", "cost_steps", "steps", "steps_steps", "tokens")

    def __init__(self) -> None:
        self.at = 0.0
        self.tokens = 0.0
        self.steps = 0.0
        self.cost = 0.0
        self.steps_steps = 0.0
        self.cost_steps = 0.0

    def add(self, tokens: int, steps: float, seconds: float, now: float) -> None:
        keep = math.exp((self.at - now) / SPLIT_S)
        self.at = now
        per_token = steps / tokens
        self.tokens = self.tokens * keep + tokens
        self.steps = self.steps * keep + steps
        self.cost = self.cost * keep + seconds
        self.steps_steps = self.steps_steps * keep + steps * per_token
        self.cost_steps = self.cost_steps * keep + seconds * per_token

    def split(self) -> _Split:
        if not self.tokens or not self.steps:
            return _Split(0.0, 0.0)
        steps, cost = self.steps / self.tokens, self.cost / self.tokens
        assumed = FIXED_SHARE * cost / steps
        variance = max(0.0, self.steps_steps / self.tokens - steps * steps)
        covariance = self.cost_steps / self.tokens - steps * cost
        prior = TRUST * steps * steps
        fixed = min(max((covariance + prior * assumed) / (variance + prior), 0.0), cost / steps)
        return _Split(fixed, cost - fixed * steps)


class _InFlight:
    """Requests in flight, averaged over requests: by time, the breaks between batches would count too."""

    __slots__ = ("squares", "total")

    def __init__(self) -> None:
        self.total = self.squares = 0.0

    def add(self, count: int) -> None:
        self.total += count
        self.squares += count * count

    def decay(self) -> None:
        self.total *= MIX_KEEP
        self.squares *= MIX_KEEP

    def mean(self) -> float:
        return self.squares / self.total if self.total else 0.0


class _Cell:
    """One task on one class."""

    __slots__ = (
        "asked",
        "at",
        "decode_s",
        "decode_steps",
        "decode_tokens",
        "evidence",
        "in_flight",
        "known",
        "looked_at",
        "mix_decode",
        "mix_prefill",
        "mix_turns",
        "prefill_s",
        "prefill_tokens",
    )

    def __init__(self) -> None:
        self.at = self.looked_at = 0.0
        self.prefill_tokens = self.prefill_s = 0.0
        self.decode_tokens = self.decode_s = self.decode_steps = 0.0
        self.evidence = 0.0
        self.asked = 0.0
        """Trajectories sent here to measure it; decays like evidence."""
        self.known = False
        self.mix_turns = self.mix_prefill = self.mix_decode = 0.0
        self.in_flight = _InFlight()

    def decay(self, now: float, fresh_s: float) -> None:
        """Let evidence grow old. Costs are ratios, which do not change by themselves."""
        if now > self.looked_at:
            fresh = math.exp((self.looked_at - now) / fresh_s)
            self.evidence *= fresh
            self.asked *= fresh
            self.looked_at = now

    def add(self, work: TaskWork, now: float, fresh_s: float) -> None:
        self.decay(now, fresh_s)
        keep = math.exp((self.at - now) / COST_S)
        self.at = now
        self.prefill_tokens = self.prefill_tokens * keep + work.prefill_tokens
        self.prefill_s = self.prefill_s * keep + work.prefill_s
        self.decode_tokens = self.decode_tokens * keep + work.decode_tokens
        self.decode_s = self.decode_s * keep + work.decode_s
        self.decode_steps = self.decode_steps * keep + work.decode_steps
        self.evidence = min(self.evidence + work.turns + work.decode_tokens / PIECE_TOKENS, 2 * ENOUGH)
        self.known = self.known or self.evidence >= ENOUGH
        self.mix_turns += work.turns
        self.mix_prefill += work.prefill_tokens
        self.mix_decode += work.decode_tokens


class CostEstimates:
    """See the module."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str], _Cell] = {}
        self._classes: dict[str, _Class] = {}
        self._in_flight: dict[str, _InFlight] = {}
        self.reports = 0
        """Reports with work so far."""
        self._stepped_at: float | None = None
        """Time of the last training step, or of the first report."""
        self._step_s = 0.0

    def add(self, hardware: str, work: Sequence[TaskWork], now: float) -> None:
        """A report of an engine of this class."""
        self.reports += bool(work)
        if self._stepped_at is None:
            self._stepped_at = now
        fresh_s = self._fresh_s(now)
        tokens, steps, seconds = 0, 0.0, 0.0
        for each in work:
            self._cell(each.task, hardware).add(each, now, fresh_s)
            tokens += each.decode_tokens
            steps += each.decode_steps
            seconds += each.decode_s
        if tokens and steps:
            self._classes.setdefault(hardware, _Class()).add(tokens, steps, seconds, now)

    def step_trained(self, now: float) -> None:
        """A batch was trained: older work weighs less in the mix."""
        if self._stepped_at is not None:
            self._step_s = now - self._stepped_at
        self._stepped_at = now
        for cell in self._cells.values():
            cell.mix_turns *= MIX_KEEP
            cell.mix_prefill *= MIX_KEEP
            cell.mix_decode *= MIX_KEEP
            cell.in_flight.decay()
        for sums in self._in_flight.values():
            sums.decay()

    def sample(self, in_flight: Mapping[tuple[str, str], int]) -> None:
        """Requests in flight now, by task and class."""
        tasks: dict[str, int] = {}
        for (task, hardware), count in in_flight.items():
            self._cell(task, hardware).in_flight.add(count)
            tasks[task] = tasks.get(task, 0) + count
        for task, count in tasks.items():
            self._in_flight.setdefault(task, _InFlight()).add(count)

    def known(self, task: str, hardware: str) -> bool:
        """Whether the cost was measured, however long ago."""
        cell = self._cells.get((task, hardware))
        return cell is not None and cell.known

    def asked(self, task: str, hardware: str, now: float) -> None:
        """A trajectory was sent there to measure it."""
        cell = self._cell(task, hardware)
        cell.decay(now, self._fresh_s(now))
        cell.asked += 1.0

    def lacks(self, task: str, hardware: str, now: float) -> float:
        """Evidence missing for a fresh estimate, less what is on its way; zero or negative if there is enough."""
        cell = self._cells.get((task, hardware))
        if cell is None:
            return ENOUGH
        cell.decay(now, self._fresh_s(now))
        return ENOUGH - cell.evidence - cell.asked

    def costs(self, task: str, hardwares: Sequence[str]) -> tuple[WorkCost, ...]:
        """Cost of all work of a task, if it ran on each of these classes."""
        cells = [cell for (owner, _), cell in self._cells.items() if owner == task]
        prefill = sum(cell.mix_prefill for cell in cells)
        decode = sum(cell.mix_decode for cell in cells)
        in_flight = self._in_flight.get(task, _InFlight()).mean()
        return tuple(self._cost(task, hardware, prefill, decode, in_flight) for hardware in hardwares)

    def costs_as_is(self, task: str) -> tuple[WorkCost, ...]:
        """Cost of a task's work on the classes where it runs now."""
        return tuple(
            self._cost(task, hardware, cell.mix_prefill, cell.mix_decode, cell.in_flight.mean())
            for (owner, hardware), cell in self._cells.items()
            if owner == task and (cell.mix_prefill or cell.mix_decode)
        )

    def _cost(self, task: str, hardware: str, prefill: float, decode: float, in_flight: float) -> WorkCost:
        cell = self._cell(task, hardware)
        split = self._classes.get(hardware, _Class()).split()
        expected_s = split.fixed * cell.decode_steps + split.marginal * cell.decode_tokens
        factor = cell.decode_s / expected_s if expected_s > 0 else 1.0
        per_prompt_token = cell.prefill_s / cell.prefill_tokens if cell.prefill_tokens > 0 else 0.0
        turns = sum(other.mix_turns for other in self._cells.values())
        scale = MIX_TURNS / turns if turns else 1.0
        return WorkCost(
            task,
            hardware,
            scale * prefill * per_prompt_token,
            scale * decode * split.marginal * factor,
            scale * decode * split.fixed * factor,
            in_flight,
        )

    def _fresh_s(self, now: float) -> float:
        since_s = 0.0 if self._stepped_at is None else now - self._stepped_at
        return max(FRESH_S, FRESH_STEPS * max(self._step_s, since_s))

    def _cell(self, task: str, hardware: str) -> _Cell:
        cell = self._cells.get((task, hardware))
        if cell is None:
            cell = self._cells[task, hardware] = _Cell()
        return cell
