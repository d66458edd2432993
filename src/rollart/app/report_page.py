"""`report.html` of a run folder, written at the end of a run and by `rollart report`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollart.app.compose import baselines_of
from rollart.app.run_folder import JOURNAL, TRAJECTORIES
from rollart.config.schema import RunConfig
from rollart.observe.page.data import gather
from rollart.observe.page.html import render
from rollart.types.errors import RollartError

PAGE = "report.html"


def write_page(folder: Path, config: RunConfig | None, out: Path | None = None) -> Path:
    """Write the page of a run in any state. The file is replaced atomically."""
    tables: dict[str, Any] | None = None if config is None else config.model_dump(mode="json")
    data = gather(folder / JOURNAL, folder / TRAJECTORIES, None if config is None else known_baselines(config), tables)
    path = out or folder / PAGE
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(render(data), encoding="utf-8")
    draft.replace(path)
    return path


def leave_page(folder: Path, config: RunConfig, say: Callable[[str], None]) -> None:
    """Write the page at the end of a run. A failure to write it is logged and never fails the run."""
    if not (folder / JOURNAL).is_file():
        return  # the run never started
    try:
        say(f"report: {write_page(folder, config)}")
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the report must never fail a run
        say(f"{folder}: no report was written ({type(error).__name__}: {error}); try: rollart report {folder}")


def known_baselines(config: RunConfig) -> dict[str, dict[str, float]]:
    """Empty if an environment's package or a prompt file is missing here, as for a run of another machine."""
    try:
        return baselines_of(config)
    except (ImportError, RollartError):
        return {}
