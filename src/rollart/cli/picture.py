"""A comparison of modes as an SVG: where the average engine's time goes in a step, one bar per mode."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from rollart.cli.render import causes_of, words
from rollart.observe.report import Report
from rollart.types.journal import TimeUse

_COLOURS = {
    TimeUse.BUSY: "#2f7d5b",
    TimeUse.BARRIER: "#c8553d",
    TimeUse.TAIL: "#e0a458",
    TimeUse.TRAINING: "#5b7db1",
    TimeUse.REWARD: "#8e6c8a",
    TimeUse.ENVIRONMENT: "#7aa5a2",
    TimeUse.WEIGHT_SYNC: "#444b6e",
    TimeUse.NO_WORK: "#b8b8b8",
}
_WIDTH, _LEFT, _RIGHT, _TOP, _BAR, _GAP = 860, 96, 92, 64, 26, 14


def comparison_svg(reports: Sequence[Report]) -> str:
    """One bar per report, all on one scale; the causes add up to the duration of a step."""
    times = [report.engine_seconds_per_step() for report in reports]
    longest = max(sum(time.values()) for time in times)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest if longest else 0.0
    shown = [cause for cause in causes_of(times) if max(time.get(cause, 0.0) for time in times) > 0.005 * longest]
    height = _TOP + len(reports) * (_BAR + _GAP) + 8
    body = [_legend(shown)]
    for index, (report, time) in enumerate(zip(reports, times, strict=True)):
        y = _TOP + index * (_BAR + _GAP)
        x = float(_LEFT)
        body.append(f'<text class="t" x="{_LEFT - 10}" y="{y + 18}" text-anchor="end">{escape(report.mode)}</text>')
        for cause in shown:
            width = time.get(cause, 0.0) * scale
            if width > 0.1:
                colour = _COLOURS.get(cause, "#999")
                title = f"{report.mode}: {words(cause)} {time[cause]:.2f} s"
                body.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}">'
                    f"<title>{escape(title)}</title></rect>"
                )
            x += width
        body.append(f'<text class="n" x="{x + 8:.1f}" y="{y + 18}">{sum(time.values()):.2f} s</text>')
    first = reports[0]
    heading = f"{first.name}: where the average engine's time goes in one step"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(heading)}" font-family="system-ui, sans-serif">'
        "<style>.t,.h{fill:#222;font-size:14px}.h{font-size:16px;font-weight:600}.n,.l{fill:#555;font-size:13px}"
        "@media (prefers-color-scheme: dark){.t,.h{fill:#eee}.n,.l{fill:#bbb}}</style>"
        f'<text class="h" x="{_LEFT}" y="22">{escape(heading)}</text>{"".join(body)}</svg>\n'
    )


def _legend(causes: Sequence[TimeUse]) -> str:
    out, x = [], float(_LEFT)
    for cause in causes:
        label = "busy" if cause is TimeUse.BUSY else f"idle: {words(cause)}"
        out.append(
            f'<rect x="{x:.0f}" y="36" width="12" height="12" fill="{_COLOURS.get(cause, "#999")}"/>'
            f'<text class="l" x="{x + 17:.0f}" y="47">{escape(label)}</text>'
        )
        x += 34 + 7.2 * len(label)
    return "".join(out)
