"""`rollart train`: a real run."""

import asyncio
import enum
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from rollart.cli.compose import check_real, is_cold_start, process_store, real_parts, worker_specs
from rollart.cli.progress import Narrator
from rollart.cli.render import show_plan, show_report
from rollart.cli.run_folder import CONFIG, CONFIG_DRAFT, held, write_config
from rollart.cli.view import LiveView
from rollart.config.load import check, load_toml, override
from rollart.config.schema import RunConfig
from rollart.control.pipeline import run_pipeline
from rollart.observe.journal import SqliteJournal, digest, fold_journal, read_journal, read_since_snapshot
from rollart.observe.metrics import MetricsSink
from rollart.policy.lineage import replay
from rollart.ports.runtime import Runtime
from rollart.ports.sink import EventSink
from rollart.ports.weights import WeightStore
from rollart.types.errors import InvariantBroken, RequestError, RunError
from rollart.types.snapshot import RunState

JOURNAL = "journal.sqlite"
PRESET = "frozenlake"
LOGS = "logs"
CHECKPOINTS = "checkpoints"
MODEL = "model"


class RuntimeKind(enum.StrEnum):
    """Where workers run."""

    INLINE = "inline"
    """In threads of this process: the least to go wrong, and a debugger sees everything."""
    RAY = "ray"
    """In processes of their own, so that generation, environments and training overlap."""


def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; without one, a small FrozenLake.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a key: --set steps=20. Repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; must be new or empty.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to go on with from its checkpoint.")] = None,
    runtime: Annotated[
        RuntimeKind, typer.Option(help="Workers as threads of this process (inline) or as processes (ray).")
    ] = RuntimeKind.INLINE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the resolved config and what goes where.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> None:
    """Train for real, on this machine.

    Example: rollart train --set steps=20 --out runs/first
    """
    _require(runtime)
    if resume is not None:
        if config is not None or out is not None:
            raise RequestError("--resume takes the config and the folder of the run; leave CONFIG and --out away")
        checked, folder = _resumed(resume, list(set_ or [])), resume
        if dry_run:
            show_plan(Console(), checked, worker_specs(checked, None, None))
            return
    else:
        tables = load_toml(config) if config is not None else load_toml(_preset())
        checked = check(RunConfig, override(tables, list(set_ or [])))
        check_real(checked)
        if dry_run:
            show_plan(Console(), checked, worker_specs(checked, None, None))
            return
        folder = _new_folder(out, checked.name)
        write_config(folder, checked.model_dump_json(indent=2) + "\n")
    _say(f"run folder: {folder}")
    try:
        with held(folder):
            state = _state(folder / JOURNAL)
            checked = with_model(checked, folder)
            with _hosts(runtime, checked, folder) as (hosts, store):
                asyncio.run(_run(checked, folder, state, hosts, store))
    except KeyboardInterrupt:
        raise RunError(f"interrupted; go on with: rollart train --resume {folder}") from None
    violations, report = fold_journal(folder / JOURNAL)[1].finish()
    if report is None:
        raise InvariantBroken(f"the journal has holes: {violations[0]}. Keep the run folder and report it.")
    if json:
        figures = msgspec.to_builtins(report, str_keys=True)
        extra = {
            "wasted_token_share": report.wasted_token_share,
            "digest": digest(read_journal(folder / JOURNAL)),
            "folder": str(folder),
        }
        sys.stdout.write(msgspec.json.encode(figures | extra).decode() + "\n")
        return
    show_report(Console(), report)


def _resumed(folder: Path, assignments: list[str]) -> RunConfig:
    """The config of a run that goes on. Overrides may change limits, not what the journal relies on."""
    tables = _read_tables(folder)
    before = check(RunConfig, tables)
    checked = check(RunConfig, override(tables, assignments))
    for key in ("seed", "mode", "alpha", "batch", "model", "codec", "algorithm.advantage"):
        if attrgetter(key)(before) != attrgetter(key)(checked):
            raise RequestError(f"--set {key}: cannot change in a run that goes on; start a new one")
    check_real(checked)
    return checked


def _state(journal: Path) -> RunState | None:
    """What a new controller goes on from; None where no event was ever durable: then the run starts."""
    events = read_since_snapshot(journal) if journal.is_file() else iter(())
    first = next(events, None)
    return None if first is None else replay(chain([first], events))


def with_model(config: RunConfig, folder: Path) -> RunConfig:
    """The config with a model that is there: one that is to be made is made, once, in the run folder."""
    if not is_cold_start(config):
        return config
    assert isinstance(config.model, dict)
    model = folder / MODEL
    if not model.is_dir():
        from rollart.cli.cold_start import make_small_model

        _say("cold start: a small model learns from scripted transcripts how the tasks are spoken to")
        began = time.perf_counter()
        loss = make_small_model(model, seed=config.seed, **config.model["cold_start"])
        _say(f"cold start: {time.perf_counter() - began:.0f} s, loss {loss:.3f}")
    return config.model_copy(update={"model": str(model)})


def read_config(folder: Path) -> RunConfig:
    """What a run was started with."""
    return check(RunConfig, _read_tables(folder))


def _read_tables(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise RequestError(f"{folder}: no {CONFIG} there; give the folder of a run")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise RequestError(f"{path} is damaged ({error}); give the folder of a run") from error


@contextmanager
def _hosts(kind: RuntimeKind, config: RunConfig, folder: Path) -> Iterator[tuple[Runtime, WeightStore]]:
    # Imported late: what these pull in, the other commands do without.
    if kind is RuntimeKind.INLINE:
        from rollart.backends.stores.memory import MemoryStore
        from rollart.distributed.inline import InlineRuntime

        yield InlineRuntime(), MemoryStore()
    else:
        from rollart.distributed.ray_local import LocalRay
        from rollart.distributed.ray_runtime import RayRuntime

        with process_store(config, folder) as store, LocalRay():
            yield RayRuntime(folder / LOGS), store


async def _run(config: RunConfig, folder: Path, state: RunState | None, runtime: Runtime, store: WeightStore) -> None:
    journal = MetricsSink(SqliteJournal(folder / JOURNAL, config.journal_mb * 10**6), folder)
    console = Console(stderr=True)
    sink: EventSink
    if console.is_terminal:
        sink = LiveView(journal, console, config.name, config.steps)
    else:
        sink = Narrator(journal, _say, config.steps)
    await run_pipeline(config, real_parts(config, runtime, sink, store, folder / CHECKPOINTS), state)


def _require(runtime: RuntimeKind) -> None:
    from importlib.util import find_spec

    needed = ("torch", "transformers", "gymnasium") + (("ray",) if runtime is RuntimeKind.RAY else ())
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise RequestError(f"training needs {', '.join(missing)}; install them with: pip install 'rollart[train]'")


def _preset() -> Path:
    with resources.as_file(resources.files("rollart.config") / "presets" / f"{PRESET}.toml") as path:
        return path


def _new_folder(out: Path | None, name: str) -> Path:
    """A folder of its own for the run: what is there already is never written over."""
    if out is not None:
        if out.exists() and (not out.is_dir() or any(entry.name != CONFIG_DRAFT for entry in out.iterdir())):
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
