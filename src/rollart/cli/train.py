"""`rollart train`: a real run."""

import asyncio
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from rollart.cli.compose import check_real, real_parts
from rollart.cli.progress import Narrator
from rollart.cli.render import show_report
from rollart.config.load import check, load_toml, override
from rollart.config.schema import RunConfig
from rollart.control.pipeline import run_pipeline
from rollart.observe.journal import SqliteJournal, digest, read_journal
from rollart.observe.report import make_report
from rollart.types.errors import RequestError

JOURNAL = "journal.sqlite"
PRESET = "frozenlake"


def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; without one, a small FrozenLake.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a key: --set steps=20. Repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; must be new or empty.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Train for real, on this machine.

    Example: rollart train --set steps=20 --out runs/first
    """
    tables = load_toml(config) if config is not None else load_toml(_preset())
    checked = check(RunConfig, override(tables, list(set_ or [])))
    _require_torch()
    check_real(checked)
    folder = _new_folder(out, checked.name)
    (folder / "config.json").write_text(checked.model_dump_json(indent=2) + "\n", encoding="utf-8")
    _say(f"run folder: {folder}")
    asyncio.run(_run(checked, folder))
    events = list(read_journal(folder / JOURNAL))
    report = make_report(events)
    if json:
        figures = msgspec.to_builtins(report, str_keys=True)
        extra = {"wasted_token_share": report.wasted_token_share, "digest": digest(events), "folder": str(folder)}
        sys.stdout.write(msgspec.json.encode(figures | extra).decode() + "\n")
        return
    show_report(Console(), report)


async def _run(config: RunConfig, folder: Path) -> None:
    # Imported late: these pull in torch, which the other commands do without.
    from rollart.backends.stores.memory import MemoryStore
    from rollart.distributed.inline import InlineRuntime

    sink = Narrator(SqliteJournal(folder / JOURNAL), _say, config.steps)
    await run_pipeline(config, real_parts(config, InlineRuntime(), sink, MemoryStore()))


def _require_torch() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers", "gymnasium") if find_spec(name) is None]
    if missing:
        raise RequestError(f"training needs {', '.join(missing)}; install them with: pip install 'rollart[train]'")


def _preset() -> Path:
    with resources.as_file(resources.files("rollart.config") / "presets" / f"{PRESET}.toml") as path:
        return path


def _new_folder(out: Path | None, name: str) -> Path:
    """A folder of its own for the run: what is there already is never written over."""
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise RequestError(f"--out {out}: is not an empty folder; name a new one, nothing there is written over")
        out.mkdir(parents=True, exist_ok=True)
        return out
    number = 1
    while (Path("runs") / f"{name}-{number}").exists():
        number += 1
    folder = Path("runs") / f"{name}-{number}"
    folder.mkdir(parents=True)
    return folder


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
