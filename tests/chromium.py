"""A page as a browser shows it: headless Chromium, without network."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Shown(NamedTuple):
    dom: str
    console: list[str]
    """Console messages, errors above all."""


def browser() -> str:
    """The browser's command; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    return found


def show(page: Path, *, width: int = 1600, dark: bool = False) -> Shown:
    """The document after its script ran."""
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={page.parent / 'browser'}",
        f"--window-size={width},1000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=5000",
        "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    return Shown(done.stdout, re.findall(r".*CONSOLE.*", done.stderr))


def text_of(dom: str, id: str) -> str:
    """The text of an element without another of its tag inside."""
    found = re.search(rf'<(\w+)[^>]* id="{id}".*?</\1>|<(\w+) id="{id}".*?</\2>', dom, re.DOTALL)
    assert found, f"there is no element {id}"
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", found[0]))
