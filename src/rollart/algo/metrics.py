"""Loss metrics in a form that micro-batches and ranks can add up.

A mean of means is wrong when micro-batches differ in size, so nothing is divided early: sums are added, maxima are
combined, and `summary` turns them into means at the end. Values stay on the device until then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Metrics:
    """Detached sums and maxima over tokens. Addition is associative, with `Metrics()` as its identity."""

    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __add__(self, other: "Metrics") -> "Metrics":
        sums, maxima = dict(self.sums), dict(self.maxima)
        for name, value in other.sums.items():
            sums[name] = sums[name] + value if name in sums else value
        for name, value in other.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        return Metrics(sums, maxima)

    def summary(self) -> dict[str, float]:
        """Plain numbers: names in `ADDED` are reported as sums, everything else as a mean over tokens.

        The effective sample size uses the ratios between trainer and engine, (Σρ)² / (n Σρ²): the fraction of tokens
        that would carry the same information without a correction (Kong 1992); 1 where both agree.
        """
        values = {name: float(value) for name, value in self.sums.items()}
        tokens = values.pop("tokens", 0.0)
        squares = values.pop("mismatch_ratio_squared", 0.0)
        out = {"tokens": tokens}
        for name, value in values.items():
            out[name] = value if name in ADDED or not tokens else value / tokens
        if squares and tokens:
            out["effective_samples"] = values["mismatch_ratio"] ** 2 / (tokens * squares)
        out.update({name: float(value) for name, value in self.maxima.items()})
        return out


ADDED = frozenset({"loss", "policy_loss", "value_loss", "value_error", "value_clipped", "sequences"})
"""Metrics reported as sums. Losses and value metrics are already divided by the totals of the whole batch."""
