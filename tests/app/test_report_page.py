"""`report.html`: every run leaves one, a browser shows it without an error, and it never costs a run."""

import re
from pathlib import Path

import pytest
from chromium import browser, show, text_of
from real_cli import Done, rollart, small_task

from rollart.app.report_page import PAGE

SLOT = "environment/maze/0.0#2"
HANG = ("inject.hang_share=1.0", "inject.bad_slots=[2]", "reset_deadline_s=3", "step_deadline_s=30", "eval_episodes=4")
EVIL_MAZE = """
class Maze:
    def reset(self, *, seed=None, options=None):
        return f"</script><script>document.title='broken'</script><img src=x onerror=alert(1)> {seed}", {}

    def step(self, action):
        return "<!--<script>", len(action) / 4, True, False, {}
"""
IN_THE_WAY = """
from pathlib import Path

class Maze:
    def reset(self, *, seed=None, options=None):
        (Path("run") / "report.html" / "taken").mkdir(parents=True, exist_ok=True)
        return "", {}

    def step(self, action):
        return "", len(action) / 4, True, False, {}
"""

TAPS = """<script>
  const tap = (node, id) => {
    const box = node.getBoundingClientRect();
    const at = { bubbles: true, clientX: box.left + box.width / 2, clientY: box.top + 2 };
    node.dispatchEvent(new PointerEvent("pointerdown", at));
    const copy = document.createElement("p");
    copy.id = id;
    copy.textContent = document.getElementById("tip").textContent;
    document.body.append(copy);
  };
  for (const button of document.querySelectorAll("button")) button.click();
  tap(document.querySelector(".span-hung"), "tapped-hang");
  tap(document.querySelector(".token"), "tapped-token");
</script>"""


def train(folder: Path, *changes: str) -> Done:
    sets = [word for change in changes for word in ("--set", change)]
    done = rollart("train", "config.toml", "--runtime", "inline", "--out", "run", *sets, cwd=folder)
    assert done.code == 0, done.err
    return done


@pytest.mark.long
def test_an_injected_hang_is_where_a_reader_looks_for_it(tmp_path: Path) -> None:
    small_task(tmp_path)
    done = train(tmp_path, "eval_every=2", *(f"tasks.maze.{change}" for change in HANG))
    page = tmp_path / "run" / PAGE
    assert f"report: run/{PAGE}\n" in done.err
    again = rollart("report", "run", "--out", "again.html", cwd=tmp_path)
    assert (again.code, again.out) == (0, "again.html\n"), again.err
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()

    shown = show(page)
    assert shown.console == []
    attention = re.search(rf"the longest: {SLOT}, reset, (\d+\.\d+) s;", text_of(shown.dom, "attention"))
    assert attention
    assert float(attention[1]) >= 3.0
    failures = text_of(shown.dom, "failures")
    assert f"hung {attention[1]} s in a reset" in failures
    assert SLOT in failures
    assert "the slot gets a fresh environment" in failures
    assert "took longer than 3 s; it gets a fresh one" in failures
    slots = text_of(shown.dom, "slots")
    assert slots.index(SLOT) < slots.index("environment/maze/0.0#0")
    assert 'class="span-hung"' in shown.dom
    assert "all rules hold" in text_of(shown.dom, "figures")
    assert 'data-logprob="-' in shown.dom
    assert 'data-version="v0.' in shown.dom

    tapped = tmp_path / "tapped.html"
    tapped.write_text(page.read_text(encoding="utf-8").replace("</body>", TAPS + "</body>"), encoding="utf-8")
    shown = show(tapped)
    assert shown.console == []
    hang, token = (text_of(shown.dom, id) for id in ("tapped-hang", "tapped-token"))
    assert f"{SLOT}: reset hung" in hang
    assert re.search(r"log-probability -\d+\.\d{3}, so .* %\s+sampled with v0\.\d", token)


def test_what_an_environment_says_is_text_on_a_phone_too(tmp_path: Path) -> None:
    browser()  # without one there is nothing to see
    small_task(tmp_path, EVIL_MAZE)
    train(tmp_path, "name=</script><b>evil")
    shown = show(tmp_path / "run" / PAGE, width=390, dark=True)
    assert shown.console == []
    assert "<title>&lt;/script&gt;&lt;b&gt;evil: rollart report</title>" in shown.dom
    assert "&lt;/script&gt;&lt;script&gt;document.title='broken'" in shown.dom
    assert "<img" not in shown.dom


def test_the_console_of_a_broken_page_is_seen(tmp_path: Path) -> None:
    (tmp_path / "broken.html").write_text("<!doctype html><script>nope()</script>")
    assert "nope is not defined" in show(tmp_path / "broken.html").console[0]


def test_a_page_that_cannot_be_written_costs_one_sentence(tmp_path: Path) -> None:
    small_task(tmp_path, IN_THE_WAY)
    done = train(tmp_path)
    assert "run: no report was written (IsADirectoryError" in done.err
    assert "try: rollart report run\n" in done.err
    refused = rollart("report", "run", cwd=tmp_path)
    assert (refused.code, refused.err.count("\n")) == (2, 1), refused.err
    assert "use --out" in refused.err


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    done = rollart("report", ".", cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "give the folder of a run" in done.err
