"""Keyed randomness: a draw depends only on its key.

There is no stateful generator, so the order of draws, the process and PYTHONHASHSEED cannot change the outcome: two
runs of the same scenario see the same workload, whatever else differs between them.
"""

import hashlib
import math
from collections.abc import Callable
from statistics import _normal_dist_inv_cdf  # type: ignore[attr-defined]  # what `NormalDist.inv_cdf` calls
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollart.config.base import Strict

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_UNIT = 2.0**-52

KeyedDraw = Callable[[int, int], float]
"""`draw(key, index)`: the value at that index in the stream of that key."""


def _standard_normal(share: float) -> float:
    quantile: float = _normal_dist_inv_cdf(share, 0.0, 1.0)
    return quantile


def mix(seed: int, *key: int) -> int:
    """A 64-bit integer that depends on `seed` and every part of `key`, including order (SplitMix64 per part)."""
    state = seed & _MASK
    for part in key:
        state = (state + (part + 1) * _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def uniform(seed: int, *key: int) -> float:
    """A number in the open interval (0, 1).

    >>> uniform(7, 1, 2) == uniform(7, 1, 2) != uniform(7, 2, 1)
    True
    """
    # 52 bits and a half: the largest value, 1 − 2⁻⁵³, is still exact in a double.
    return ((mix(seed, *key) >> 12) + 0.5) * _UNIT


def stable_int(text: str) -> int:
    """A 64-bit integer for a name, the same in every process; not for hot paths."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


_FIELDS = {
    "constant": ({"value"},),
    "uniform": ({"low", "high"},),
    "normal": ({"mean", "sigma"},),
    "lognormal": ({"median", "sigma"}, {"mean", "sigma"}),
}


class Distribution(Strict):
    """Distribution of a length or a latency. A plain number is a constant.

    `lognormal` takes its median or its mean; `sigma` is that of the logarithm. Values are clipped to `min` and `max`. A
    share `tail_share` of all draws gives exactly `tail`, unclipped: the rare hang.
    """

    kind: Literal["constant", "uniform", "normal", "lognormal"] = "constant"
    value: float | None = None
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    median: float | None = None
    sigma: float | None = Field(default=None, ge=0)
    min: float = 0.0
    max: float | None = None
    tail_share: float = Field(default=0.0, ge=0, lt=1)
    tail: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _number_is_constant(cls, data: Any) -> Any:
        if isinstance(data, int | float) and not isinstance(data, bool):
            return {"kind": "constant", "value": data}
        return data

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Self:
        given = {
            name for name in ("value", "low", "high", "mean", "median", "sigma") if getattr(self, name) is not None
        }
        choices = _FIELDS[self.kind]
        if given not in choices:
            wanted = " or ".join(" and ".join(sorted(choice)) for choice in choices)
            raise ValueError(f"{self.kind} takes {wanted}, not {', '.join(sorted(given)) or 'nothing'}")
        if self.kind == "lognormal" and not (self.median or self.mean or 0.0) > 0:
            raise ValueError("the median or mean of a lognormal must be above 0")
        if self.kind == "uniform" and _given(self.low) > _given(self.high):
            raise ValueError("low is above high")
        if self.max is not None and self.max < self.min:
            raise ValueError("max is below min")
        if (self.tail_share > 0) != (self.tail is not None):
            raise ValueError("tail_share and tail go together")
        return self

    def sample(self, u: float) -> float:
        """Value at `u` in (0, 1): the inverse distribution function, with the tail at its lower end."""
        return self.sampler()(u)

    def sampler(self) -> Callable[[float], float]:
        """`sample` as a plain function, for hot paths."""
        body = self._body()
        low, high = self.min, math.inf if self.max is None else self.max

        def cut(u: float) -> float:
            value = body(u)
            return low if value < low else high if value > high else value

        if self.tail is None:
            return cut
        share, rest, tail = self.tail_share, 1.0 - self.tail_share, self.tail

        def with_tail(u: float) -> float:
            if u < share:
                return tail
            # Map the rest of the interval back to (0, 1), open at both ends.
            return cut(min(max((u - share) / rest, _UNIT), 1.0 - _UNIT))

        return with_tail

    def keyed(self) -> KeyedDraw:
        """As a function of a key and an index; a constant skips the mixing."""
        sampler = self.sampler()
        if self.kind == "constant" and self.tail is None:
            constant = sampler(0.5)
            return lambda _key, _index: constant

        if self.kind == "lognormal" and self.tail is None:
            return self._keyed_lognormal()

        def draw(key: int, index: int) -> float:
            # `uniform(key, index)` inlined: there are three draws per turn, and function calls dominate their cost.
            state = (key + (index + 1) * _GOLDEN) & _MASK
            state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
            return sampler((((state ^ (state >> 31)) >> 12) + 0.5) * _UNIT)

        return draw

    def _keyed_lognormal(self) -> KeyedDraw:
        """The general case, fully inlined: almost all draws of a large run are lognormal."""
        mu, sigma, exp, quantile = self._mu(), _given(self.sigma), math.exp, _normal_dist_inv_cdf
        low, high = self.min, math.inf if self.max is None else self.max

        def draw(key: int, index: int) -> float:
            state = (key + (index + 1) * _GOLDEN) & _MASK
            state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
            value = exp(mu + sigma * quantile((((state ^ (state >> 31)) >> 12) + 0.5) * _UNIT, 0.0, 1.0))
            return low if value < low else high if value > high else value

        return draw

    def _mu(self) -> float:
        """Mean of the logarithm of a lognormal."""
        if self.median is not None:
            return math.log(self.median)
        return math.log(_given(self.mean)) - _given(self.sigma) * _given(self.sigma) / 2

    def _body(self) -> Callable[[float], float]:
        sigma = _given(self.sigma) if self.sigma is not None else 0.0
        if self.kind == "constant":
            value = _given(self.value)
            return lambda _u: value
        if self.kind == "uniform":
            low, width = _given(self.low), _given(self.high) - _given(self.low)
            return lambda u: low + width * u
        if self.kind == "normal":
            mean = _given(self.mean)
            return lambda u: mean + sigma * _standard_normal(u)
        mu, exp = self._mu(), math.exp
        return lambda u: exp(mu + sigma * _standard_normal(u))


def _given(value: float | None) -> float:
    if value is None:
        raise ValueError("a parameter of the distribution is missing")
    return value
