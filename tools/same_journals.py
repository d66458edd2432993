"""Whether two checkouts behave alike: the journals of the same fuzz seeds, compared event by event.

    python tools/same_journals.py BEFORE AFTER --seeds 2000

A refactoring must not change what a run does. `BEFORE` and `AFTER` are checkouts of rollart (`git worktree add`). Every
seed is a world of `rollart fuzz`, run by both in virtual time, where journals are identical byte for byte unless the
code decides differently. `journal_renames.toml` lists what is meant to differ: renames are applied to the journals of
`BEFORE`, fields that `BEFORE` does not have yet are dropped from those of `AFTER`, and text whose new form cannot be
derived from the old is normalised in both.
Exit code 0: all journals agree; 1: some differ, and the first difference is printed.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RENAMES = Path(__file__).with_name("journal_renames.toml")
JOBS = 2


def main() -> int:
    """Compare two checkouts; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="checkout before the restructuring")
    parser.add_argument("after", type=Path, help="checkout after it")
    parser.add_argument("--seeds", type=int, default=200, help="number of worlds")
    parser.add_argument("--from", dest="first", type=int, default=0, help="first seed")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    with ThreadPoolExecutor(JOBS) as pool:
        before = pool.submit(lambda: dict(digests(given.before, seeds, renamed=True)))
        after = pool.submit(lambda: dict(digests(given.after, seeds, renamed=False)))
        differing = [seed for seed in seeds if before.result()[seed] != after.result()[seed]]
    events = sum(count for count, _ in after.result().values())
    print(f"{len(seeds) - len(differing)} of {len(seeds)} journals agree ({events:,} events)")  # noqa: T201
    if differing:
        print(f"differing seeds: {differing[:20]}")  # noqa: T201
        print(first_difference(given.before, given.after, differing[0]))  # noqa: T201
    return 1 if differing else 0


def digests(checkout: Path, seeds: range, *, renamed: bool) -> Iterator[tuple[int, tuple[int, str]]]:
    """Per seed the number of events and a digest of the journal, computed by the code of `checkout`."""
    for line in _run_child(checkout, seeds, renamed=renamed, digest=True):
        seed, count, digest = line.split()
        yield int(seed), (int(count), digest)


def first_difference(before: Path, after: Path, seed: int) -> str:
    """The first event that the two journals of a seed do not share."""
    one = list(_run_child(before, range(seed, seed + 1), renamed=True, digest=False))
    other = list(_run_child(after, range(seed, seed + 1), renamed=False, digest=False))
    for number, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return f"seed {seed}, event {number}:\n  before: {left}\n  after:  {right}"
    return f"seed {seed}: {len(one)} events before, {len(other)} after"


def _run_child(checkout: Path, seeds: range, *, renamed: bool, digest: bool) -> Iterator[str]:
    order = {"first": seeds.start, "count": len(seeds), "renamed": renamed, "digest": digest}
    environment = {**os.environ, "PYTHONPATH": str(checkout.absolute() / "src"), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, str(Path(__file__).absolute()), "--child", json.dumps(order)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.rstrip("\n")
    if process.returncode:
        raise SystemExit(f"{checkout}: the worlds could not be run (exit code {process.returncode})")


def child(order: dict[str, Any]) -> None:
    """Run the worlds with whatever rollart is on the path; print a line per seed, or per event."""
    import msgspec

    from rollart.sim.crashes import run_world
    from rollart.sim.fuzz import make_world

    edit = Differences.load(before=order["renamed"])
    for seed in range(order["first"], order["first"] + order["count"]):
        hashed, count = hashlib.blake2b(digest_size=16), 0
        for event in run_world(make_world(seed)).events:
            line = edit(msgspec.json.encode(event, order="sorted").decode())
            count += 1
            hashed.update(line.encode())
            if not order["digest"]:
                print(line)  # noqa: T201
        if order["digest"]:
            print(seed, count, hashed.hexdigest(), flush=True)  # noqa: T201


class Differences:
    """What is meant to differ (`journal_renames.toml`), removed from one encoded event.

    `[events]` maps names of events, `[fields.EVENT]` names of fields, `[values.EVENT.FIELD]` whole values; `[added]`
    lists new fields per event; `[[patterns]]` have `event`, `field`, `match` (a regular expression) and `replace`.
    Renames and patterns apply to journals of `BEFORE`, added fields to those of `AFTER`, patterns with `both = true` to
    all.
    """

    def __init__(self, tables: dict[str, Any]) -> None:
        self._events: dict[str, str] = tables.get("events", {})
        self._fields: dict[str, dict[str, str]] = tables.get("fields", {})
        self._values: dict[str, dict[str, dict[str, Any]]] = tables.get("values", {})
        self._added: dict[str, list[str]] = tables.get("added", {})
        patterns = tables.get("patterns", [])
        self._patterns = [(p["event"], p["field"], re.compile(p["match"]), p["replace"]) for p in patterns]
        named = (event for event, *_ in self._patterns)
        touched = {*self._events, *self._fields, *self._values, *self._added, *named}
        self._touched = tuple(f'"type":"{event}"' for event in sorted(touched))

    @classmethod
    def load(cls, *, before: bool) -> Callable[[str], str]:
        tables = tomllib.loads(RENAMES.read_text(encoding="utf-8"))
        added, patterns = tables.pop("added", {}), tables.get("patterns", [])
        if before:
            return cls(tables)
        return cls({"added": added, "patterns": [pattern for pattern in patterns if pattern.get("both")]})

    def __call__(self, line: str) -> str:
        if not any(mark in line for mark in self._touched):
            return line
        import msgspec

        event = json.loads(line)
        kind = event["type"]
        for field in self._added.get(kind, ()):
            event.pop(field, None)
        for name, field, match, replace in self._patterns:
            if name == kind and isinstance(event.get(field), str):
                event[field] = match.sub(replace, event[field])
        for field, values in self._values.get(kind, {}).items():
            if isinstance(event.get(field), str):
                event[field] = values.get(event[field], event[field])
            elif isinstance(event.get(field), dict):
                event[field] = {values.get(key, key): value for key, value in event[field].items()}
        fields = self._fields.get(kind, {})
        event = {fields.get(key, key): value for key, value in event.items()}
        event["type"] = self._events.get(kind, kind)
        return msgspec.json.encode(event, order="sorted").decode()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
