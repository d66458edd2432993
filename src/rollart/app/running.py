"""A real run from request to report; shared by `rollart train` and `rollart.run`.

Invariants: invalid requests are refused by `new_run` and `resumed_run` or, if that depends on the runtime, at the start
of `carry_out`, before anything is written or started; a run folder is never overwritten; however a run ends, its
workers end with it and it can be resumed.
"""

import enum
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from rollart.app.checkpoints import check_unused, checkpoint_place, held_versions, is_url, newest_name
from rollart.app.cluster import check_placement, cluster_nodes, connected, served_files
from rollart.app.compose import (
    check_interpreters,
    check_real,
    cluster_store,
    codec_of,
    is_cold_start,
    process_store,
    rank_needs,
    real_parts,
)
from rollart.app.devices import leave_split, plan_devices
from rollart.app.given_prompts import FOLDER as PROMPTS
from rollart.app.given_prompts import keep_rows, located
from rollart.app.interruption import Interruption
from rollart.app.progress import ProgressLogger
from rollart.app.redaction import Redactor
from rollart.app.report_page import leave_page
from rollart.app.reward_workers import check_places, secrets_of
from rollart.app.run_folder import CONFIG, CONFIG_DRAFT, JOURNAL, TRAJECTORIES, TRANSCRIPTS, held, write_config
from rollart.app.step_callback import StepCallback, StepWatch, check_callback
from rollart.app.trajectory_texts import TrajectoryTexts
from rollart.app.transcript_store import TranscriptStore
from rollart.app.view import LiveView
from rollart.backends.trainers.checkpoint import CheckpointPlace
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.control.pipeline import run_pipeline
from rollart.observe.journal import SqliteJournal, fold_journal, read_since_snapshot
from rollart.observe.metrics import MetricsSink
from rollart.observe.report import Report
from rollart.policy.lineage import replay
from rollart.ports.factory import load
from rollart.ports.files import RunFiles
from rollart.ports.ranks import RankStarter
from rollart.ports.runtime import Runtime
from rollart.ports.sink import EventSink
from rollart.ports.weights import WeightStore
from rollart.types.errors import (
    ConfigError,
    FilesError,
    Interrupted,
    InvariantBroken,
    RequestError,
    RunError,
    RuntimeLost,
)
from rollart.types.ids import WorkerId
from rollart.types.messages import Role
from rollart.types.snapshot import RunState
from rollart.types.trajectory import Trajectory

if TYPE_CHECKING:
    from rollart.distributed.ray_cluster import RayCluster
    from rollart.distributed.ray_runtime import RayRuntime

LOGS = "logs"
CPU = "cpu.json"
"""CPU seconds by role, of the last session of a run that finished."""
MODEL = "model"

Tables = Mapping[str, Any]


class RuntimeKind(enum.StrEnum):
    """Where workers run."""

    INLINE = "inline"
    """In threads of this process: the simplest setup, fully visible to a debugger."""
    RAY = "ray"
    """In separate processes, so that generation, environments and training overlap."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request. `folder` is that of the run to resume, None for a new one."""

    config: RunConfig
    folder: Path | None = None
    kept: RunConfig | None = None
    """Config to write to the folder of a run to resume, for the next resume."""


def new_run(tables: Tables) -> Plan:
    config = check(RunConfig, tables)
    check_real(config)
    check_unused(config)
    return Plan(config)


def resumed_run(folder: Path, change: Callable[[Tables], Tables]) -> Plan:
    """Plan to resume a run. `change` may change limits, but nothing that the journal or a checkpoint relies on.

    Later resumes have the changes too.
    """
    tables = _read_tables(folder)
    before, changed = check(RunConfig, tables), check(RunConfig, change(tables))
    config = located(changed, folder)
    for key in ("seed", "mode", "alpha", "batch", "model", "codec", "algorithm.advantage"):
        if attrgetter(key)(before) != attrgetter(key)(config):
            raise ConfigError(key, "cannot change when a run is resumed; start a new run")
    if (before.trainer.lora is None) != (config.trainer.lora is None):
        raise ConfigError("trainer.lora", "is used for a whole run or not at all; start a new run")
    if before.checkpoint_url != config.checkpoint_url:
        raise ConfigError("checkpoint_url", "cannot change when a run is resumed; start a new run")
    saved = held_versions(config, folder)
    if saved and saved[-1].step > config.steps:
        raise ConfigError("steps", f"the run has already trained {saved[-1].step} steps; give at least as many")
    check_real(config)
    kept = keep_rows(changed, folder)
    return Plan(located(kept, folder), folder, kept)


def carry_out(
    plan: Plan,
    runtime: RuntimeKind,
    out: Path | None = None,
    cores: Mapping[Role, Sequence[int]] | None = None,
    interruption: Interruption | None = None,
    address: str | None = None,
    on_step: StepCallback | None = None,
) -> tuple[Path, Report]:
    """Run all steps; returns the run's folder and a report that covers the journal from the first start on.

    `cores` pins the worker processes of a role to some of the cores. `interruption` is the caller's, if it handles
    signals in another thread. `address` is that of a Ray cluster to run on, instead of a private Ray. `on_step` is
    called after every step, in place of that of the config.
    """
    check_places(plan.config, processes=runtime is RuntimeKind.RAY, local=address is None)
    if address is None:
        check_interpreters(plan.config, processes=runtime is RuntimeKind.RAY)
    elif runtime is RuntimeKind.INLINE:
        raise RequestError("an address is that of a Ray cluster, and the inline runtime uses none; use --runtime ray")
    with connected(address) as cluster:
        if cluster is not None:
            for reason in check_placement(plan.config, resumed=plan.folder is not None):
                say(f"waits for nodes: {reason}")
        devices = plan_devices(plan.config, None if cluster is None else cluster_nodes(), plan.folder)
        folder, config = plan.folder, devices.config
        if folder is None:
            folder = free_folder(out, plan.config.name, plan.config)
            config = located(keep_rows(config, folder), folder)
        plan = replace(plan, config=config)
        if devices.chosen:
            say(devices.sentence())
        if cluster is not None:
            cluster.advice = _go_on(folder)
        callback = load(plan.config.on_step) if on_step is None and plan.config.on_step else on_step

        def start(config: RunConfig) -> AbstractContextManager[Hosts]:
            leave_split(folder, devices)
            return _hosts(runtime, config, folder, cores, cluster)

        return _carry_out(plan, folder, start, interruption, callback)


@dataclass(frozen=True, slots=True)
class Hosts:
    """What a run is carried out with: where its workers run, and how weights, files and ranks get there."""

    runtime: Runtime
    store: WeightStore
    files: RunFiles | None = None
    """Reaches the checkpoints of the run folder from other machines."""
    rank_starter: RankStarter | None = None
    """Starts the ranks of the trainer; without it they are child processes."""


def _carry_out(
    plan: Plan,
    folder: Path,
    start: Callable[[RunConfig], AbstractContextManager[Hosts]],
    interruption: Interruption | None,
    on_step: StepCallback | None,
) -> tuple[Path, Report]:
    say(f"run folder: {folder}")
    try:
        with held(folder), Interruption(say) if interruption is None else nullcontext(interruption) as stop:
            if plan.kept is not None:
                write_config(folder, _text(plan.kept))
            state = _state(folder / JOURNAL)
            config = with_model(plan.config, folder)
            try:
                with start(config) as hosts:
                    place = checkpoint_place(config, folder, hosts.files)
                    stop.cancels(_run(config, folder, state, hosts, place, on_step))
            finally:
                leave_page(folder, plan.config, say)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {_kept(folder)}. {_go_on(folder)}") from None
    except RuntimeLost as error:
        raise RuntimeLost(f"{error}; {_kept(folder)}. {_go_on(folder)}") from error
    except OSError as error:
        raise RunError(f"{folder}: {error}. Free space or fix it, then: rollart train --resume {folder}") from error
    report = _audited(folder)
    checkpoint = newest_name(config, folder)
    if checkpoint:
        say(f"model: {checkpoint}")
        if not is_url(config):
            say(f"load it with: {how_to_load(config, checkpoint)}")
    return folder, report


def _audited(folder: Path) -> Report:
    """Report of a run that ended. Violations of the rules are said: they do not undo what was trained."""
    violations, report = fold_journal(folder / JOURNAL)[1].finish()
    if report is None:
        raise InvariantBroken(f"the journal is inconsistent: {violations[0]}. Keep the run folder and report a bug.")
    if violations:
        say(f"the journal breaks {len(violations)} rules, the first: {violations[0]}. See: rollart audit {folder}")
    return report


def how_to_load(config: RunConfig, checkpoint: Path | str) -> str:
    """The Python expression that loads a checkpoint. `config` names the model that training started from."""
    if config.trainer.lora is None:
        return f"AutoModelForCausalLM.from_pretrained({json.dumps(str(checkpoint))})"
    model = f"AutoModelForCausalLM.from_pretrained({json.dumps(str(config.model))})"
    return f"PeftModel.from_pretrained({model}, {json.dumps(str(checkpoint))})"


def _state(journal: Path) -> RunState | None:
    """State to resume from; None if no event was ever durable, in which case the run starts afresh."""
    events = read_since_snapshot(journal) if journal.is_file() else iter(())
    first = next(events, None)
    return None if first is None else replay(chain([first], events))


def require(runtime: RuntimeKind) -> None:
    """Raise if a package is missing."""
    needed = ("torch", "transformers", "gymnasium") + (("ray",) if runtime is RuntimeKind.RAY else ())
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"training needs {', '.join(missing)}; install them with: pip install 'rollart[train]'")


def read_config(folder: Path) -> RunConfig:
    """Config that a run was started or, later, resumed with."""
    return located(check(RunConfig, _read_tables(folder)), folder)


def with_model(config: RunConfig, folder: Path) -> RunConfig:
    """The config with its initial model; a model that must be created is created once, in the run folder."""
    model = folder / MODEL
    if is_cold_start(config):
        assert isinstance(config.model, dict)
        if not model.is_dir():
            say("cold start: a small model learns the format of the tasks from scripted transcripts")
            began = time.perf_counter()
            _make_model("cold_start", {"folder": str(model), "seed": config.seed, **config.model["cold_start"]})
            say(f"cold start: took {time.perf_counter() - began:.0f} s")
    elif isinstance(config.model, dict) and config.trainer.lora is not None:
        # Random weights are the same in every process, but LoRA checkpoints need their base model as a folder.
        if not model.is_dir():
            _make_model("initial_model", {"folder": str(model), "seed": config.seed, "model": config.model})
    else:
        return config
    return config.model_copy(update={"model": str(model)})


def _make_model(module: str, order: Mapping[str, Any]) -> None:
    """Create the model in a separate process, so that the controller never loads torch."""
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", f"rollart.app.{module}", json.dumps(order)],
            stdin=subprocess.PIPE,  # closed when this process ends, however it ends, which ends the other one too
            stdout=subprocess.PIPE,
            stderr=stderr,  # no pipe: a full one would block the process while its other output is read
            text=True,
            # Several threads that spin while they wait for each other are twenty times slower on a busy machine.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                say(line.rstrip())
            process.communicate()
        finally:
            process.kill()
            process.wait()
        stderr.seek(0)
        errors = stderr.read().strip().splitlines()
    if process.returncode:
        raise RunError(
            f"creating the model failed: {errors[-1] if errors else f'{module} ended with {process.returncode}'}"
        )


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _read_tables(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise RequestError(f"{folder} has no {CONFIG}; give the folder of a run")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise RequestError(f"{path} is damaged ({error}); give the folder of a run") from error


def free_folder(out: Path | None, name: str, config: RunConfig) -> Path:
    """Create a new folder, `out` or one below `runs`, with the config; existing files are never overwritten."""
    if out is not None and not _is_free(out):
        raise RequestError(f"--out {out}: is not an empty folder; name a new one, existing files are not overwritten")
    folder = Path("runs") if out is None else out
    try:
        if out is None:
            folder = _numbered(name)
        else:
            folder.mkdir(parents=True, exist_ok=True)
        write_config(folder, _text(keep_rows(config, folder)))
    except OSError as error:
        raise RequestError(f"{folder}: cannot create the run folder ({error}); free space, or use --out") from error
    return folder


def _text(config: RunConfig) -> str:
    return config.model_dump_json(indent=2) + "\n"


def _is_free(folder: Path) -> bool:
    """Whether it is missing, or empty except for what a run leaves that was killed before it had a config."""
    if not folder.is_dir():
        return not folder.exists()
    return all(entry.name in (CONFIG_DRAFT, PROMPTS) for entry in folder.iterdir())


def _numbered(name: str) -> Path:
    """Create a folder that no other run has, however many start at once."""
    number = 0
    while True:
        number += 1
        folder = Path("runs") / f"{name}-{number}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir()
            return folder


def _go_on(folder: Path) -> str:
    return f"Resume with: rollart train --resume {folder}"


def _kept(folder: Path) -> str:
    """What a resume starts from."""
    try:
        saved = held_versions(read_config(folder), folder)
    except FilesError as error:
        return f"which checkpoints there are is not known: {error}"
    return f"the last checkpoint is that of step {saved[-1].step}" if saved else "there is no checkpoint yet"


@contextmanager
def _hosts(
    kind: RuntimeKind,
    config: RunConfig,
    folder: Path,
    cores: Mapping[Role, Sequence[int]] | None,
    cluster: "RayCluster | None",
) -> Iterator[Hosts]:
    # Late imports: other commands do not need these.
    if kind is RuntimeKind.INLINE:
        from rollart.backends.stores.memory import MemoryStore
        from rollart.distributed.inline import InlineRuntime

        yield Hosts(InlineRuntime(), MemoryStore())
        return
    from rollart.distributed.ray_local import LocalRay
    from rollart.distributed.ray_ranks import RayRanks
    from rollart.distributed.ray_runtime import RayRuntime

    ranks = RayRanks(config.trainer.ranks, config.algorithm.minibatches, rank_needs(config))
    if cluster is None:
        local = LocalRay(logs=folder / LOGS / "ray", advice=_go_on(folder))
        with process_store(config, folder) as store, local:
            runtime = RayRuntime(folder / LOGS, cores=cores, local=local)
            with _cpu_accounted(folder, runtime):
                yield Hosts(runtime, store, rank_starter=ranks)
    else:
        with cluster_store(config) as store:
            files = served_files(config, folder, folder / LOGS)
            runtime = RayRuntime(
                folder / LOGS, cores=cores, local=cluster, code=cluster.code, files=files, release=store.release
            )
            with _cpu_accounted(folder, runtime):
                yield Hosts(runtime, store, files.checkpoints, ranks)


@contextmanager
def _cpu_accounted(folder: Path, runtime: "RayRuntime") -> Iterator[None]:
    before_s = time.process_time()
    yield
    _leave_cpu(folder, time.process_time() - before_s, runtime.cpu_s)


def _leave_cpu(folder: Path, controller_s: float, workers_s: Mapping[WorkerId, float]) -> None:
    """Record the CPU time of a finished run by role."""
    roles = {"controller": controller_s}
    for worker, spent_s in workers_s.items():
        role = worker.partition("/")[0]
        roles[role] = roles.get(role, 0.0) + spent_s
    (folder / CPU).write_bytes(msgspec.json.encode(roles) + b"\n")
    ordered = sorted(roles.items(), key=lambda each: -each[1])
    say("CPU: " + ", ".join(f"{role} {spent_s:.1f} s" for role, spent_s in ordered))


async def _run(
    config: RunConfig,
    folder: Path,
    state: RunState | None,
    hosts: Hosts,
    checkpoints: Path | CheckpointPlace,
    on_step: StepCallback | None,
) -> None:
    journal = MetricsSink(SqliteJournal(folder / JOURNAL, config.journal_mb * 10**6), folder)
    console = Console(stderr=True)
    sink: EventSink
    if console.is_terminal:
        sink = LiveView(journal, console, config.name, config.steps)
    else:
        sink = ProgressLogger(journal, say, config.steps)
    try:
        watch = None if on_step is None else StepWatch(sink, check_callback(on_step))
        redactor = Redactor(config.redact, secrets_of(config))
        texts = TrajectoryTexts(folder / TRAJECTORIES, codec_of(config), config.steps, say, redactor)
        transcripts = TranscriptStore(folder / TRANSCRIPTS, config.transcripts_mb * 10**6, say, redactor)

        def ended(trajectory: Trajectory, cause: str) -> None:
            texts.ended(trajectory, cause)
            transcripts.ended(trajectory)

        parts = real_parts(config, hosts.runtime, watch or sink, hosts.store, checkpoints, ended, hosts.rank_starter)
        if watch is not None:
            parts = replace(parts, on_step=watch.on_step)
        await run_pipeline(config, parts, state)
    finally:
        await sink.close()  # again: the pipeline closes it once it was made
