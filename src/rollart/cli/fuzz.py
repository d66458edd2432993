"""`rollart fuzz`: test the control plane in thousands of randomised worlds, clusters and faults."""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from rollart.app.output import check_target
from rollart.cli.sim import parse_mode
from rollart.config.modes import Mode
from rollart.observe.journal import write_trace
from rollart.sim.crashes import Fuzzed, run_world
from rollart.sim.fuzz import World, make_world
from rollart.sim.shrink import shrink
from rollart.sim.verdict import Verdict, check_seed
from rollart.types.errors import RequestError

CHUNK = 20


def fuzz(
    seeds: Annotated[int, typer.Option(help="Number of worlds.")] = 200,
    from_: Annotated[int, typer.Option("--from", help="First seed.")] = 0,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    mode: Annotated[str, typer.Option(help="Test one mode only; by default the seeds alternate over all five.")] = "",
    seed: Annotated[int | None, typer.Option(help="Replay one seed; a failure is reduced to a minimal world.")] = None,
    trace: Annotated[Path | None, typer.Option(help="With --seed: write its journal here, as JSON lines.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print only one JSON object on stdout.")] = False,
) -> None:
    """Test the control plane against faults in virtual time, checking the invariants of the design from its journal.

    Example: rollart fuzz --seeds 2000
    """
    chosen = parse_mode(mode) if mode else None
    if seeds < 1 or jobs < 1:
        raise RequestError("--seeds and --jobs must be at least 1")
    if seed is not None:
        check_target("--trace", trace)
        _replay(seed, chosen, trace, json=json)
        return
    if trace is not None:
        raise RequestError("--trace needs --seed: it writes the journal of one world")
    started = time.monotonic()
    verdicts = list(_progress(_all(range(from_, from_ + seeds), chosen, jobs), seeds))
    summary = _summary(verdicts, time.monotonic() - started)
    failed = [verdict for verdict in verdicts if verdict.violations]
    for verdict in failed[:20]:
        _say(f"seed {verdict.seed} ({verdict.mode}): {verdict.violations[0]}")
        _say(f"  replay: rollart fuzz --seed {verdict.seed}{f' --mode {mode}' if mode else ''} --trace journal.jsonl")
    if json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    else:
        _print(summary)
    if failed:
        raise typer.Exit(1)


def _check_many(seeds: list[int], mode: Mode | None) -> list[Verdict]:
    return [check_seed(seed, mode) for seed in seeds]


def _all(seeds: range, mode: Mode | None, jobs: int) -> Iterator[Verdict]:
    """Verdicts in the order of the seeds, whichever process ran them."""
    chunks = [list(seeds[start : start + CHUNK]) for start in range(0, len(seeds), CHUNK)]
    if jobs == 1:
        for chunk in chunks:
            yield from _check_many(chunk, mode)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for verdicts in pool.map(_check_many, chunks, [mode] * len(chunks)):
            yield from verdicts


def _progress(verdicts: Iterator[Verdict], total: int) -> Iterator[Verdict]:
    failed = 0
    for number, verdict in enumerate(verdicts, start=1):
        if verdict.violations:
            failed += 1
            _say(f"seed {verdict.seed} failed: {verdict.violations[0]}")
        if number % 500 == 0 and number < total:
            _say(f"{number} of {total} worlds, {failed} failed")
        yield verdict


def _summary(verdicts: list[Verdict], seconds: float) -> dict[str, Any]:
    injected: Counter[int] = Counter()
    for verdict in verdicts:
        injected.update(verdict.injected)
    return {
        "seeds": len(verdicts),
        "violations": sum(bool(verdict.violations) for verdict in verdicts),
        "seconds": round(seconds, 1),
        "faults": {str(row): injected[row] for row in (*range(1, 25), 33)},
        "modes": dict(sorted(Counter(verdict.mode for verdict in verdicts).items())),
        "steps": sum(verdict.steps for verdict in verdicts),
        "trajectories": sum(verdict.trajectories for verdict in verdicts),
        "min_steps": min(verdict.steps for verdict in verdicts),
        "min_trajectories": min(verdict.trajectories for verdict in verdicts),
        "failed_seeds": [verdict.seed for verdict in verdicts if verdict.violations],
    }


def _replay(seed: int, mode: Mode | None, trace: Path | None, *, json: bool) -> None:
    done = run_world(make_world(seed, mode))
    if trace is not None:
        write_trace(trace, done.events)
    summary = {
        "seed": seed,
        "violations": [str(violation) for violation in done.violations],
        "steps": done.steps,
        "trajectories": done.trajectories,
        "faults": {str(row): count for row, count in sorted(done.injected.items())},
        "digest": done.digest,
    }
    if json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    else:
        _print(summary)
    if done.violations:
        _say(f"the smallest world that still violates rule {done.violations[0].rule}:")
        _say(describe(_shrunk(done)))
        raise typer.Exit(1)


def _shrunk(done: Fuzzed) -> World:
    rule = done.violations[0].rule
    return shrink(done.world, lambda world: any(found.rule == rule for found in run_world(world).violations))


def describe(world: World) -> str:
    """Description of a world, detailed enough to write a test from."""
    tables = msgspec.json.format(msgspec.json.encode(world.tables), indent=2).decode()
    faults = "\n".join(f"  {fault}" for fault in world.faults) or "  none"
    return f"{tables}\nfaults:\n{faults}\nlink: {world.link}\ncontroller dies at: {world.controller_dies_at_s}"


def _print(summary: dict[str, Any]) -> None:
    for key, value in summary.items():
        sys.stdout.write(f"{key:18} {value}\n")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
