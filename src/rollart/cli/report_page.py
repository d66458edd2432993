"""`report.html` of a run folder: written when a run ends, and by `rollart report`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollart.cli.compose import baselines_of
from rollart.cli.run_folder import JOURNAL, TRAJECTORIES
from rollart.config.schema import RunConfig
from rollart.observe.page.data import gather
from rollart.observe.page.html import render
from rollart.types.errors import RollartError

PAGE = "report.html"


def write_page(folder: Path, config: RunConfig | None, out: Path | None = None) -> Path:
    """Write the page of a run, whatever state it is in; there whole or not at all."""
    tables: dict[str, Any] | None = None if config is None else config.model_dump(mode="json")
    data = gather(folder / JOURNAL, folder / TRAJECTORIES, None if config is None else _baselines(config), tables)
    path = out or folder / PAGE
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(render(data), encoding="utf-8")
    draft.replace(path)
    return path


def leave_page(folder: Path, config: RunConfig, say: Callable[[str], None]) -> None:
    """The same at the end of a run, which has ended as it has: what goes wrong here is said and no more."""
    if not (folder / JOURNAL).is_file():
        return  # it never began
    try:
        say(f"report: {write_page(folder, config)}")
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - a page is never worth a run
        say(f"{folder}: no report was written ({type(error).__name__}: {error}); try: rollart report {folder}")


def _baselines(config: RunConfig) -> dict[str, dict[str, float]]:
    """None where the package of an environment, or a file of prompts, is missing here: the run was elsewhere."""
    try:
        return baselines_of(config)
    except (ImportError, RollartError):
        return {}
