"""`rollart train --out RUN --continue`: for what restarts by itself."""

from real_cli import rollart, small_task

from rollart.observe.journal import fold_journal, read_journal
from rollart.types.journal import RunResumed


def test_the_run_is_started_once_and_then_resumed(tmp_path):
    small_task(tmp_path)
    words = ("train", "config.toml", "--out", "run", "--continue", "--runtime", "inline")
    done = rollart(*words, "--set", "steps=1", cwd=tmp_path)
    assert done.code == 0, done.err
    done = rollart(*words, "--set", "steps=2", cwd=tmp_path)
    assert done.code == 0, done.err
    violations, report = fold_journal(tmp_path / "run" / "journal.sqlite")[1].finish()
    assert (violations, report.steps) == ([], 2)
    assert sum(isinstance(event, RunResumed) for event in read_journal(tmp_path / "run" / "journal.sqlite")) == 1


def test_prompts_that_are_gone_at_the_end_leave_a_run_a_success(tmp_path):
    """Its report has no scores of scripts then."""
    small_task(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"number": {number}}}\n' for number in range(8)))
    (tmp_path / "steps.py").write_text(
        "from pathlib import Path\n\ndef drop(step):\n    Path('rows.jsonl').unlink(missing_ok=True)\n"
    )
    changes = ("--set", "tasks.maze.prompts=rows.jsonl", "--set", "on_step=steps.py:drop")
    done = rollart("train", "config.toml", "--out", "run", "--runtime", "inline", *changes, cwd=tmp_path)
    assert done.code == 0, done.err


def test_a_folder_of_a_run_is_needed(tmp_path):
    small_task(tmp_path)
    done = rollart("train", "config.toml", "--continue", cwd=tmp_path)
    assert done.code == 2
    assert "--continue needs --out" in done.err
