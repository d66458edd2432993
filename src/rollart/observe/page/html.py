"""The page as one file: template, style, script and data."""

from importlib import resources

import msgspec

from rollart.observe.page.data import PageData


def render(data: PageData) -> str:
    """Fill the template. Data of the run is in one JSON element, without HTML characters, and is shown as text only."""
    parts = {
        "/* style */": _part("report.css"),
        "{}": as_script_text(msgspec.json.encode(msgspec.to_builtins(data, str_keys=True)).decode()),
        "/* script */": _part("report.js"),
    }
    page = _part("report.html")
    out = []
    for place, text in parts.items():
        before, _, page = page.partition(place)
        out += [before, text]
    return "".join([*out, page])


def as_script_text(json: str) -> str:
    r"""Escape JSON so that it can be embedded in an HTML element, whatever it contains.

    >>> as_script_text('["</script>"]')
    '["\\u003c/script\\u003e"]'
    """
    for sign in "<>&\u2028\u2029":
        json = json.replace(sign, f"\\u{ord(sign):04x}")
    return json


def _part(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")
