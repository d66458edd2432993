"""Prompt sources: seeds, JSON lines, a folder, simulated."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harnesses.common import TASK
from rollart.conformance.prompts import PromptSourceHarness
from rollart.sim.prompts import CountingPrompts
from rollart.tasks.prompt_files import FolderPrompts, JsonLinesPrompts
from rollart.tasks.prompts import SeedPrompts


def seed_prompts() -> PromptSourceHarness:
    return PromptSourceHarness(
        build=lambda: SeedPrompts(TASK, 10, 7, shuffle_seed=1),
        task=TASK,
        pass_length=7,
        foreign=(
            lambda: SeedPrompts("another", 10, 7, shuffle_seed=1),
            lambda: SeedPrompts(TASK, 10, 8, shuffle_seed=1),
            lambda: SeedPrompts(TASK, 10, 7, shuffle_seed=2),
        ),
    )


def json_line_prompts() -> PromptSourceHarness:
    def source(task: str = TASK, rows: int = 7, **options: Any) -> JsonLinesPrompts:
        file = _prompt_folder() / f"{rows}.jsonl"
        file.write_text("".join(json.dumps({"question": number, "of": [rows]}) + "\n" for number in range(rows)))
        return JsonLinesPrompts(task, str(file), **options)

    return PromptSourceHarness(
        build=source,
        task=TASK,
        pass_length=7,
        foreign=(lambda: source("another"), lambda: source(rows=8), lambda: source(shuffle_seed=2)),
    )


def folder_prompts() -> PromptSourceHarness:
    def source(task: str = TASK, word: str = "text", **options: Any) -> FolderPrompts:
        folder = _prompt_folder() / word
        folder.mkdir(exist_ok=True)
        for number in range(5):
            (folder / f"{number}.txt").write_text(f"{word} {number}")
        return FolderPrompts(task, str(folder), **options)

    return PromptSourceHarness(
        build=source,
        task=TASK,
        pass_length=5,
        foreign=(lambda: source("another"), lambda: source(word="other"), lambda: source(shuffle_seed=2)),
    )


def _prompt_folder() -> Path:
    """One for the process; its files are always written alike."""
    return Path(_PROMPT_FILES.name)


_PROMPT_FILES = tempfile.TemporaryDirectory()


def counting_prompts() -> PromptSourceHarness:
    return PromptSourceHarness(
        build=lambda: CountingPrompts(TASK, 10),
        task=TASK,
        foreign=(lambda: CountingPrompts("another", 10), lambda: CountingPrompts(TASK, 11)),
    )


PROMPT_SOURCES: dict[str, Callable[[], PromptSourceHarness]] = {
    "seeds": seed_prompts,
    "json lines": json_line_prompts,
    "folder": folder_prompts,
    "sim": counting_prompts,
}
