"""A real run from request to report: what `rollart train` and `rollart.run` share.

What holds: whatever can be refused is refused by `new_run` and `resumed_run`, before anything is written or started;
a run folder is never written over; however a run ends, its workers end with it and it can be resumed.
"""

import enum
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from rollart.backends.trainers.checkpoint import Checkpoints
from rollart.cli.compose import check_real, codec_of, is_cold_start, process_store, real_parts
from rollart.cli.interruption import Interruption
from rollart.cli.progress import Narrator
from rollart.cli.report_page import leave_page
from rollart.cli.run_folder import CONFIG, CONFIG_DRAFT, JOURNAL, TRAJECTORIES, held, write_config
from rollart.cli.trajectory_texts import TrajectoryTexts
from rollart.cli.view import LiveView
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.control.pipeline import run_pipeline
from rollart.observe.journal import SqliteJournal, fold_journal, read_since_snapshot
from rollart.observe.metrics import MetricsSink
from rollart.observe.report import Report
from rollart.policy.lineage import replay
from rollart.ports.runtime import Runtime
from rollart.ports.sink import EventSink
from rollart.ports.weights import WeightStore
from rollart.types.errors import ConfigError, Interrupted, InvariantBroken, RequestError, RunError
from rollart.types.ids import WorkerId
from rollart.types.messages import Role
from rollart.types.snapshot import RunState

LOGS = "logs"
CPU = "cpu.json"
"""CPU seconds by role, of the last start of a run that came to its end."""
CHECKPOINTS = "checkpoints"
MODEL = "model"

Tables = Mapping[str, Any]


class RuntimeKind(enum.StrEnum):
    """Where workers run."""

    INLINE = "inline"
    """In threads of this process: the least to go wrong, and a debugger sees everything."""
    RAY = "ray"
    """In processes of their own, so that generation, environments and training overlap."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request. `folder` is that of the run to go on with, None for a new one."""

    config: RunConfig
    folder: Path | None = None


def new_run(tables: Tables) -> Plan:
    config = check(RunConfig, tables)
    check_real(config)
    return Plan(config)


def resumed_run(folder: Path, change: Callable[[Tables], Tables]) -> Plan:
    """A run that goes on. `change` may change limits, not what the journal relies on."""
    tables = _read_tables(folder)
    before, config = check(RunConfig, tables), check(RunConfig, change(tables))
    for key in ("seed", "mode", "alpha", "batch", "model", "codec", "algorithm.advantage"):
        if attrgetter(key)(before) != attrgetter(key)(config):
            raise ConfigError(key, "cannot change in a run that goes on; start a new one")
    check_real(config)
    return Plan(config, folder)


def carry_out(
    plan: Plan, runtime: RuntimeKind, out: Path | None = None, cores: Mapping[Role, Sequence[int]] | None = None
) -> tuple[Path, Report]:
    """Do all steps; gives the run's folder and what the journal says of it, from its first start on.

    `cores` binds the workers of a role, where they are processes, to some of the cores.
    """
    folder = _new_folder(out, plan.config) if plan.folder is None else plan.folder
    say(f"run folder: {folder}")
    try:
        with held(folder), Interruption(say) as interruption:
            state = _state(folder / JOURNAL)
            config = with_model(plan.config, folder)
            try:
                with _hosts(runtime, config, folder, cores) as (hosts, store):
                    interruption.cancels(_run(config, folder, state, hosts, store))
            finally:
                leave_page(folder, plan.config, say)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {_kept(folder)}. Go on with: rollart train --resume {folder}") from None
    except OSError as error:
        raise RunError(f"{folder}: {error}. Make room or mend it, then: rollart train --resume {folder}") from error
    violations, report = fold_journal(folder / JOURNAL)[1].finish()
    if report is None:
        raise InvariantBroken(f"the journal has holes: {violations[0]}. Keep the run folder and report it.")
    return folder, report


def _state(journal: Path) -> RunState | None:
    """What a new controller goes on from; None where no event was ever durable: then the run starts."""
    events = read_since_snapshot(journal) if journal.is_file() else iter(())
    first = next(events, None)
    return None if first is None else replay(chain([first], events))


def require(runtime: RuntimeKind) -> None:
    """Refuse where a package is missing."""
    needed = ("torch", "transformers", "gymnasium") + (("ray",) if runtime is RuntimeKind.RAY else ())
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"training needs {', '.join(missing)}; install them with: pip install 'rollart[train]'")


def read_config(folder: Path) -> RunConfig:
    """What a run was started with."""
    return check(RunConfig, _read_tables(folder))


def with_model(config: RunConfig, folder: Path) -> RunConfig:
    """The config with a model that is there: one that is to be made is made, once, in the run folder."""
    if not is_cold_start(config):
        return config
    assert isinstance(config.model, dict)
    model = folder / MODEL
    if not model.is_dir():
        say("cold start: a small model learns from scripted transcripts how the tasks are spoken to")
        began = time.perf_counter()
        _cold_start({"folder": str(model), "seed": config.seed, **config.model["cold_start"]})
        say(f"cold start: took {time.perf_counter() - began:.0f} s")
    return config.model_copy(update={"model": str(model)})


def _cold_start(order: Mapping[str, Any]) -> None:
    """In a process of its own: so the controller never loads torch."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rollart.cli.cold_start", json.dumps(order)],
        stdin=subprocess.PIPE,  # is closed when this process ends, however it ends; then the other one ends too
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip())
        said = process.communicate()[1].strip().splitlines()
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RunError(f"the cold start failed: {said[-1] if said else f'it ended with {process.returncode}'}")


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _read_tables(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise RequestError(f"{folder}: no {CONFIG} there; give the folder of a run")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise RequestError(f"{path} is damaged ({error}); give the folder of a run") from error


def _new_folder(out: Path | None, config: RunConfig) -> Path:
    """A folder of its own for the run, with its config: what is there already is never written over."""
    if out is not None and not _is_free(out):
        raise RequestError(f"--out {out}: is not an empty folder; name a new one, nothing there is written over")
    folder = _free_name(config.name) if out is None else out
    try:
        folder.mkdir(parents=True, exist_ok=out is not None)
        write_config(folder, config.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise RequestError(f"{folder}: the run folder cannot be made ({error}); make room, or use --out") from error
    return folder


def _is_free(folder: Path) -> bool:
    """Not there, or empty but for what a run leaves that was killed before it had a config."""
    if not folder.is_dir():
        return not folder.exists()
    return all(entry.name == CONFIG_DRAFT for entry in folder.iterdir())


def _free_name(name: str) -> Path:
    number = 1
    while (Path("runs") / f"{name}-{number}").exists():
        number += 1
    return Path("runs") / f"{name}-{number}"


def _kept(folder: Path) -> str:
    """What a resume begins with."""
    saved = Checkpoints(folder / CHECKPOINTS).held()
    return f"the last checkpoint is that of step {saved[-1].step}" if saved else "there is no checkpoint yet"


@contextmanager
def _hosts(
    kind: RuntimeKind, config: RunConfig, folder: Path, cores: Mapping[Role, Sequence[int]] | None
) -> Iterator[tuple[Runtime, WeightStore]]:
    # Imported late: what these pull in, the other commands do without.
    if kind is RuntimeKind.INLINE:
        from rollart.backends.stores.memory import MemoryStore
        from rollart.distributed.inline import InlineRuntime

        yield InlineRuntime(), MemoryStore()
    else:
        from rollart.distributed.ray_local import LocalRay
        from rollart.distributed.ray_runtime import RayRuntime

        with process_store(config, folder) as store, LocalRay():
            runtime = RayRuntime(folder / LOGS, cores=cores)
            before_s = time.process_time()
            yield runtime, store
            _leave_cpu(folder, time.process_time() - before_s, runtime.cpu_s)


def _leave_cpu(folder: Path, controller_s: float, workers_s: Mapping[WorkerId, float]) -> None:
    """Where the processor time of a run went that came to its end, by what the processes are."""
    roles = {"controller": controller_s}
    for worker, spent_s in workers_s.items():
        role = worker.partition("/")[0]
        roles[role] = roles.get(role, 0.0) + spent_s
    (folder / CPU).write_bytes(msgspec.json.encode(roles) + b"\n")
    said = sorted(roles.items(), key=lambda each: -each[1])
    say("CPU: " + ", ".join(f"{role} {spent_s:.1f} s" for role, spent_s in said))


async def _run(config: RunConfig, folder: Path, state: RunState | None, runtime: Runtime, store: WeightStore) -> None:
    journal = MetricsSink(SqliteJournal(folder / JOURNAL, config.journal_mb * 10**6), folder)
    console = Console(stderr=True)
    sink: EventSink
    if console.is_terminal:
        sink = LiveView(journal, console, config.name, config.steps)
    else:
        sink = Narrator(journal, say, config.steps)
    texts = TrajectoryTexts(folder / TRAJECTORIES, codec_of(config), config.steps, say)
    parts = real_parts(config, runtime, sink, store, folder / CHECKPOINTS, texts.ended)
    await run_pipeline(config, parts, state)
