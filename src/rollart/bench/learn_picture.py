"""Picture of the results of `rollart bench learn`: held-out success, by trained trajectories and by time."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from rollart.bench.learn_run import Interval, interval

_COLOURS = ("#c8553d", "#2f9d6e", "#5b7db1", "#b9852f")
_WIDTH, _HEIGHT, _TOP, _BOTTOM = 860, 380, 72, 48
_PANELS = ((60, 400), (480, 820))
"""Left and right edge of each."""


class At(NamedTuple):
    """A point of a mean curve."""

    trajectories: float
    minutes: float
    success: Interval


def learn_svg(arms: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """`arms` as in the JSON of the benchmark: curves by arm and seed. Lines are means, bands 95 % intervals
    over seeds."""
    curves = {arm: _mean_curve(list(by_seed.values())) for arm, by_seed in arms.items()}
    seeds = len(next(iter(arms.values())))
    heading = f"Held-out success in arithmetic with slow environments, {seeds} seeds"
    if seeds == 1:
        heading = heading.removesuffix("s")
    panels = (
        _panel(_PANELS[0], curves, lambda at: at.trajectories, "trained trajectories"),
        _panel(_PANELS[1], curves, lambda at: at.minutes, "minutes"),
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(heading)}" font-family="system-ui, sans-serif">'
        "<style>.h,.l{fill:#222;font-size:14px}.h{font-size:16px;font-weight:600}.n{fill:#555;font-size:13px}"
        ".g{stroke:#888;stroke-opacity:.3}"
        "@media (prefers-color-scheme: dark){.h,.l{fill:#eee}.n{fill:#bbb}}</style>"
        f'<text class="h" x="{_PANELS[0][0]}" y="22">{escape(heading)}</text>{_legend(curves)}{"".join(panels)}</svg>\n'
    )


def _mean_curve(curves: Sequence[Sequence[Mapping[str, Any]]]) -> list[At]:
    return [
        At(
            at[0]["trajectories"],
            math.fsum(point["seconds"] for point in at) / len(at) / 60,
            interval([point["success"] for point in at]),
        )
        for at in zip(*curves, strict=True)
    ]


def _legend(arms: Mapping[str, object]) -> str:
    out, x = [], float(_PANELS[0][0])
    for arm, colour in zip(arms, _COLOURS, strict=False):
        label = arm.replace("alpha", "rollart, α = ")
        out.append(
            f'<rect x="{x:.0f}" y="36" width="12" height="12" fill="{colour}"/>'
            f'<text class="l" x="{x + 17:.0f}" y="47">{escape(label)}</text>'
        )
        x += 40 + 7.5 * len(label)
    return "".join(out)


def _panel(edges: tuple[int, int], curves: Mapping[str, Sequence[At]], along: Callable[[At], float], label: str) -> str:
    left, right = edges
    top, bottom = _TOP, _HEIGHT - _BOTTOM
    longest = max(along(at) for curve in curves.values() for at in curve)

    def x(value: float) -> float:
        return left + (right - left) * value / longest

    def y(success: float) -> float:
        return bottom - (bottom - top) * min(max(success, 0.0), 1.0)

    out = []
    for percent in range(0, 101, 20):
        height = y(percent / 100)
        out.append(
            f'<line class="g" x1="{left}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>'
            f'<text class="n" x="{left - 8}" y="{height + 4:.1f}" text-anchor="end">{percent} %</text>'
        )
    out += [
        f'<text class="n" x="{x(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{tick:,g}</text>'
        for tick in ticks(longest)
    ]
    out.append(
        f'<text class="n" x="{(left + right) / 2}" y="{bottom + 38}" text-anchor="middle">{escape(label)}</text>'
    )
    for curve, colour in zip(curves.values(), _COLOURS, strict=False):
        highs = [(x(along(at)), y(at.success.mean if at.success.high is None else at.success.high)) for at in curve]
        lows = [(x(along(at)), y(at.success.mean if at.success.low is None else at.success.low)) for at in curve]
        line = [(x(along(at)), y(at.success.mean)) for at in curve]
        out.append(
            f'<polygon points="{_places([*highs, *reversed(lows)])}" fill="{colour}" fill-opacity=".18"/>'
            f'<polyline points="{_places(line)}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        )
    return "".join(out)


def _places(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def ticks(longest: float) -> list[float]:
    """Round numbers starting at 0, four to eight of them.

    >>> ticks(2304)
    [0, 500, 1000, 1500, 2000]
    >>> ticks(0.9)
    [0.0, 0.2, 0.4, 0.6, 0.8]
    """
    power = 10.0 ** math.floor(math.log10(longest))
    step = next(power * share for share in (0.1, 0.2, 0.5, 1.0, 2.0) if longest / (power * share) < 8)
    whole = [round(number * step, 10) for number in range(int(longest / step) + 1)]
    return [int(each) for each in whole] if step >= 1 else whole
