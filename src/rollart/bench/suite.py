"""`rollart bench all`: run every benchmark in sequence, and write one table of their figures.

Invariants: a figure is shown as it was measured, whether or not it meets its target; a benchmark that could not run, or
failed, is in the table with the reason. Results are stored as JSON beside the table, so that one benchmark can be
repeated while the others stay.
"""

import json as jsonlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from rollart.app.output import check_target
from rollart.bench.common import say
from rollart.config.suggest import did_you_mean
from rollart.types.errors import RequestError, RunError

ROLLART = (sys.executable, "-m", "rollart")
REFUSED = 2
"""Exit code of a benchmark that cannot run here."""
OURS = "rollart: "
"""Prefix of an explanation on stderr."""
SIZES = ("1M", "3M", "10M", "50M")
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}
"""By the flag in /proc/cpuinfo, widest first."""
NO_VLLM = "vLLM is not installed: make venv-vllm"
TITLE = """# Benchmarks

Written by `rollart bench all` from the output of each benchmark; the raw results are in [{json}]({json}).
`rollart bench NAME --help` explains the figures. Figures that miss their target are shown as measured. A + after a
commit means uncommitted changes.
"""


class Target(NamedTuple):
    """The range that a figure should be in."""

    low: float | None = None
    high: float | None = None

    def met(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.low:g}"
        if self.low is None or self.high is None:
            return f"≤ {self.high:g}" if self.low is None else f"≥ {self.low:g}"
        return f"{self.low:g} to {self.high:g}"


class Figure(NamedTuple):
    """One row of the table."""

    key: str
    """Path in the benchmark's JSON, such as `busy.sync_share`."""
    target: Target | None = None
    absent: str = ""
    """Why it may be missing; without a reason it is required."""


class BenchSpec(NamedTuple):
    """One benchmark: its arguments after `rollart bench`, and its figures. A benchmark added here is in the table.

    `{folder}` in an argument is the folder of the table, `{trl}` the Python of TRL's environment.
    """

    arguments: tuple[str, ...]
    figures: tuple[Figure, ...]


YES = Target(1, 1)
BENCHES: Mapping[str, BenchSpec] = {
    "control": BenchSpec(
        ("control",),
        (
            Figure("us_per_turn", Target(high=100)),
            Figure("step_cpu_s", Target(high=60)),
            Figure("peak_mb", Target(high=500)),
            Figure("growth_exponent", Target(high=1.1)),
        ),
    ),
    "engine": BenchSpec(
        ("engine",),
        (
            *(Figure(f"{size}.vs_generate_b64", Target(low=2)) for size in SIZES),
            *(Figure(f"{size}.vs_generate_multiturn", Target(low=5)) for size in SIZES),
            *(
                Figure(f"{size}.limit_share_b64", Target(low=0.75) if size in ("10M", "50M") else None)
                for size in SIZES
            ),
            *(Figure(f"{size}.vs_vllm_b64", Target(low=2), absent=NO_VLLM) for size in SIZES),
        ),
    ),
    "env": BenchSpec(
        ("env",), (Figure("hosting_us", Target(high=200)), Figure("interpreter_adds_us", Target(high=300)))
    ),
    "reward": BenchSpec(
        ("reward",),
        (
            Figure("lost", Target(0, 0)),
            Figure("doubled", Target(0, 0)),
            Figure("added_ms_p50", Target(high=5)),
            Figure("paid_over_work", Target(high=2.5)),
            Figure("utilisation"),
            Figure("dedicated_utilisation"),
            Figure("over_dedicated", Target(low=3)),
        ),
    ),
    "train": BenchSpec(("train",), tuple(Figure(f"{size}.vs_padded") for size in ("1M", "10M", "50M"))),
    "loop": BenchSpec(
        ("loop",),
        (
            Figure("bad.bad_over_share", Target(low=0.9)),
            Figure("bad.trained_failures", Target(0, 0)),
            Figure("busy.engine_busy.local", Target(low=0.85)),
            Figure("busy.sync_share", Target(high=0.02)),
            Figure("runtimes.same_assignment", YES),
            Figure("runtimes.mean_difference_points", Target(-5, 5)),
        ),
    ),
    "modes": BenchSpec(
        ("modes",),
        (
            Figure("rollart_over_sync", Target(low=2.65)),
            Figure("rollart_over_sync_plus", Target(low=2.05)),
            Figure("rollart_over_one_off"),
            Figure("rollart_over_areal", Target(low=1.2)),
            Figure("bound"),
            Figure("of_bound"),
            Figure("latency_0.rollart_over_sync"),
            Figure("latency_0.rollart_over_sync_plus"),
            Figure("latency_0.bound"),
        ),
    ),
    "affinity": BenchSpec(
        ("affinity",),
        (
            Figure("over_best_fixed", Target(low=0.95)),
            Figure("over_wrong", Target(low=1)),
            Figure("assigned_by_step", Target(high=20)),
            Figure("moves_after_20_steps", Target(high=2)),
            Figure("change.noticed", YES),
        ),
    ),
    "affinity_sim": BenchSpec(
        ("affinity", "--sim"),
        (
            Figure("over_declared", Target(low=0.97)),
            Figure("over_H800_only", Target(low=1)),
            Figure("over_H20_only", Target(low=1)),
            Figure("moves"),
        ),
    ),
    "ray": BenchSpec(
        ("ray",),
        (
            Figure("us_per_turn", Target(high=300)),
            Figure("over_local", Target(low=0.9)),
            Figure("sync_share", Target(high=0.02)),
            Figure("weight_over_tcp", Target(low=0.5)),
        ),
    ),
    "trl": BenchSpec(
        ("trl", "--part", "episodes", "--python", "{trl}"),
        (
            Figure("over_environment_factory", Target(low=5)),
            Figure("over_rollout_func", Target(low=3)),
            Figure("over_environment_factory_latency", Target(low=20)),
            Figure("over_rollout_func_latency", Target(low=4)),
        ),
    ),
    "trl_dataset": BenchSpec(
        ("trl", "--part", "dataset", "--python", "{trl}"),
        (
            Figure("over_dataset"),
            Figure("sides.rollart_dataset.trajectories_per_s"),
            Figure("sides.trl_dataset.trajectories_per_s"),
            Figure("lines.rollart"),
            Figure("lines.trl"),
        ),
    ),
    "sandbox": BenchSpec(
        ("sandbox",),
        (
            Figure("created_per_s"),
            Figure("create_p50_ms"),
            Figure("create_p95_ms"),
            Figure("warm_reset_p50_ms", Target(high=20)),
            Figure("warm_reset_p95_ms", Target(high=20)),
            Figure("command_p50_ms"),
        ),
    ),
    "learn": BenchSpec(
        ("learn", "--picture", "{folder}/learn.svg"),
        (
            Figure("points_alpha1.mean"),
            Figure("points_alpha1.low", Target(low=-5)),
            Figure("points_alpha1.worst"),
            Figure("points_alpha2.mean"),
            Figure("points_alpha2.low", Target(low=-5)),
            Figure("points_alpha2.worst"),
            Figure("time_ratio_alpha1", Target(high=0.5)),
            Figure("time_ratio_alpha2", Target(high=0.5)),
        ),
    ),
    "learn_latency": BenchSpec(
        ("learn", "--work", "latency"),
        (
            Figure("points_rollart.mean"),
            Figure("points_rollart.low", Target(low=-3)),
            Figure("points_rollart.high", Target(high=3)),
            Figure("kinds.slow.points_rollart.mean"),
            Figure("kinds.slow.points_rollart.low"),
            Figure("kinds.slow.points_rollart.high"),
            Figure("points_plain.mean"),
            Figure("points_plain.low"),
            Figure("points_plain.high"),
        ),
    ),
}


class Record(msgspec.Struct, kw_only=True, frozen=True):
    """Result of a benchmark, or the reason why there is none, with date, commit and machine."""

    date: str
    commit: str
    machine: str
    seconds: float
    result: dict[str, Any] | None = None
    not_run: str = ""
    failed: str = ""


Records = dict[str, Record]


def all_(
    out: Annotated[Path, typer.Option(help="The table; results go beside it, as JSON.")] = Path("benchmarks.md"),
    only: Annotated[
        list[str] | None, typer.Option(help="Run only this benchmark and keep the rest of the table. Repeatable.")
    ] = None,
    trl: Annotated[Path, typer.Option(help="Python of an environment with TRL; this one by default.")] = Path(
        sys.executable
    ),
) -> None:
    """Run all benchmarks in sequence, and write one table of their figures (Markdown). Takes hours.

    Nothing else should run meanwhile. A benchmark that cannot run here, because a package is missing, is in the table
    with the reason; so is one that failed, and then the command fails too. A figure that misses its target is not a
    failure.

    Example: rollart bench all --out docs/benchmarks.md --only loop
    """
    check_target("--out", out)
    for name in only or ():
        if name not in BENCHES:
            raise RequestError(
                f"--only: no benchmark {name!r}{did_you_mean(name, BENCHES)}; there are {', '.join(BENCHES)}"
            )
    kept = out.with_suffix(".json")
    records = read_records(kept) if only else {}
    commit, machine = commit_of_sources(), this_machine()
    wanted = [name for name in BENCHES if not only or name in only]
    for name in wanted:
        say(f"--- {name}")
        records[name] = measure(BENCHES[name], commit, machine, folder=out.parent, trl=trl)
        # After every benchmark, so that an interrupted command keeps what was measured so far.
        kept.write_bytes(msgspec.json.format(msgspec.json.encode(records), indent=1) + b"\n")
        out.write_text(markdown(records, kept.name), encoding="utf-8")
    failed = [name for name in wanted if records[name].failed]
    if failed:
        raise RunError(f"{', '.join(failed)} failed; see {out} for the reason")


def read_records(path: Path) -> Records:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Records) if path.is_file() else {}
    except msgspec.MsgspecError as error:
        raise RequestError(f"{path} is damaged ({error}); restore it, or omit --only to write a new one") from None


# --- one bench ------------------------------------------------------------------------------------------------------


def measure(bench: BenchSpec, commit: str, machine: str, **places: Path) -> Record:
    """Run a benchmark in its own process."""
    began, began_s = datetime.now(UTC), time.monotonic()
    arguments = [argument.format(**places) for argument in bench.arguments]
    code, out, last = _run([*ROLLART, "bench", *arguments, "--json"])
    about: dict[str, Any] = {
        "date": f"{began:%Y-%m-%d}",
        "commit": commit,
        "machine": machine,
        "seconds": round(time.monotonic() - began_s, 1),
    }
    if code == REFUSED and last.startswith(OURS):
        return Record(**about, not_run=last.removeprefix(OURS))
    if code:
        return Record(**about, failed=f"exit code {code}: {last.removeprefix(OURS)}")
    try:
        result = jsonlib.loads(out)
        for figure in bench.figures:
            find(result, figure)
    except (ValueError, RunError) as error:
        return Record(**about, failed=f"unexpected output: {error}")
    return Record(**about, result=result)


def _run(command: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, stdout, and the last line of stderr, which is also forwarded to ours."""
    last = ""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        with subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True, encoding="utf-8") as process:
            assert process.stderr is not None
            for line in process.stderr:
                sys.stderr.write(line)
                last = line.strip() or last
        out.seek(0)
        return process.returncode, out.read(), last


def find(result: Mapping[str, Any], figure: Figure) -> Any:
    """The value of a figure; None if it is missing with a known reason, or was not reached."""
    value: Any = result
    for key in figure.key.split("."):
        if not isinstance(value, Mapping) or key not in value:
            if figure.absent:
                return None
            raise RunError(f"{figure.key} is missing")
        value = value[key]
    return value


# --- where it was measured ------------------------------------------------------------------------------------------


def commit_of_sources() -> str:
    """The commit of this package, with a + if it has uncommitted changes; empty without a repository."""
    here = Path(__file__).parents[1]
    try:
        commit = _git(here, "rev-parse", "--short", "HEAD")
        return commit + ("+" if _git(here, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def this_machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [
        _processor(),
        f"{cores} cores",
        f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        f"{platform.system()} {platform.machine()}",
        f"Python {platform.python_version()}",
        *_torch(),
    ]
    return ", ".join(parts)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, platform.processor() or "unknown processor")
    # Virtual machines with the same processor name differ in this, and matrix products depend on it.
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    vectors = next((name for flag, name in VECTORS.items() if flag in flags), "")
    return f"{name} with {vectors}" if vectors else name


def _torch() -> Iterator[str]:
    try:
        yield f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        return


# --- the table ------------------------------------------------------------------------------------------------------


def markdown(records: Records, json_name: str) -> str:
    """The table of all records, in the order of `BENCHES`."""
    known = {name: records[name] for name in BENCHES if name in records}
    rows = [("bench", "figure", "measured", "target", "met", "date", "commit", "took"), ("---",) * 8]
    for name, record in known.items():
        about = (record.date, record.commit or "unknown", _duration(record.seconds))
        for number, cells in enumerate(_cells(BENCHES[name], record)):
            rows.append(("" if number else name, *cells, *(about if not number else ("",) * 3)))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([TITLE.format(json=json_name), *_machines(known), "", *lines]) + "\n"


def _machines(records: Records) -> list[str]:
    by_machine: dict[str, list[str]] = {}
    for name, record in records.items():
        by_machine.setdefault(record.machine, []).append(name)
    if len(by_machine) == 1:
        return [f"Measured on: {machine}." for machine in by_machine]
    return ["Measured on:", *(f"- {', '.join(names)}: {machine}" for machine, names in by_machine.items())]


def _cells(bench: BenchSpec, record: Record) -> list[tuple[str, str, str, str]]:
    """Figure, measured, target, met."""
    if record.result is None:
        what = f"failed: {record.failed}" if record.failed else f"not run: {record.not_run}"
        return [("", what.replace("|", "\\|"), "", "**no**" if record.failed else "")]
    cells = []
    for figure in bench.figures:
        value = find(record.result, figure)
        met = figure.target is not None and value is not None and figure.target.met(value)
        missing = value is None and figure.absent
        measured = f"not run: {figure.absent}" if missing else _value(value)
        verdict = "" if figure.target is None or missing else ("yes" if met else "**no**")
        target = "" if figure.target is None else ("yes" if figure.target is YES else str(figure.target))
        cells.append((f"`{figure.key}`", measured, target, verdict))
    return cells


def _value(value: Any) -> str:
    """
    >>> [_value(each) for each in (True, None, 0, 0.30123, 76.4321, 261.9)]
    ['yes', 'not reached', '0', '0.301', '76.4', '262']
    """
    if value is None:
        return "not reached"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    """
    >>> _duration(42.4), _duration(3700)
    ('42 s', '62 min')
    """
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
