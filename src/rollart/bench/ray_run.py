"""The runs of `rollart bench ray`, and figures from their journals."""

import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from rollart.app.api import merged
from rollart.app.run_folder import JOURNAL
from rollart.app.running import CPU, RuntimeKind, new_run, require, with_model
from rollart.bench.common import say
from rollart.bench.runs import Tables, throughput
from rollart.config.load import load_toml
from rollart.distributed import trial_cluster
from rollart.observe.journal import read_journal
from rollart.observe.report import make_report
from rollart.types import journal as j
from rollart.types.errors import RunError

CPUS = 64
"""Declared by each node; not what it has, so that nothing waits for room."""


def measure(tables: Tables, folder: Path, rounds: int | None = None) -> dict[str, Any]:
    """All measurements. Runs are sequential and kept in `folder`."""
    require(RuntimeKind.RAY)
    bench = _Bench(tables, folder)
    pairs = [bench.pair(number) for number in range(tables["rounds"] if rounds is None else rounds)]
    return {
        "us_per_turn": statistics.median(pair["us_per_turn"] for pair in pairs),
        "over_local": statistics.median(pair["over_local"] for pair in pairs),
        "sync_share": bench.sync_share(),
        **bench.weights(),
        "pairs": pairs,
    }


class _Bench:
    def __init__(self, tables: Tables, folder: Path) -> None:
        self._tables = tables
        self._folder = folder
        model = with_model(new_run({**tables["run"], "model": tables["model"]}).config, folder).model
        self._run = {**tables["run"], "model": model}

    def pair(self, number: int) -> dict[str, float]:
        """The same work on a private Ray, and on the cluster."""
        cluster = self._tables["cluster"]
        local = self._carry_out(f"local-{number}", self._run, None)
        with _trial(cluster["nodes"]) as address:
            remote = self._carry_out(f"cluster-{number}", merged(self._run, cluster["changes"]), address)
        counted = (self._tables["warm_up"], self._tables["cool_down"])
        events = list(read_journal(remote / JOURNAL))
        rate = throughput(events, *counted)
        controller_s = msgspec.json.decode((remote / CPU).read_bytes())["controller"]
        turns = sum(isinstance(event, j.TurnEnded) for event in events)
        return {
            "us_per_turn": 1e6 * controller_s / turns,
            "over_local": rate / throughput(list(read_journal(local / JOURNAL)), *counted),
            "trajectories_per_s": rate,
        }

    def sync_share(self) -> float:
        presets = resources.files("rollart.config") / "presets" / "quickstart.toml"
        with resources.as_file(presets) as preset:
            tables = merged(load_toml(preset), {"steps": self._tables["quickstart_steps"], "eval_every": 0})
        with _trial(self._tables["cluster"]["nodes"]) as address:
            done = self._carry_out("quickstart", tables, address)
        return make_report(list(read_journal(done / JOURNAL))).steady.suspended

    def weights(self) -> dict[str, Any]:
        with _trial(self._tables["weights"]["nodes"]) as address:
            return self._side("weights", {"kind": "weights", "address": address})

    def _carry_out(self, name: str, run: Mapping[str, Any], address: str | None) -> Path:
        folder = self._folder / name
        self._side(name, {"kind": "run", "run": run, "folder": str(folder), "address": address})
        return folder

    def _side(self, name: str, order: Mapping[str, Any]) -> dict[str, Any]:
        say(f"{name} ...")
        beside = self._folder / f"{name}.side"
        beside.mkdir()
        (beside / "order.json").write_bytes(msgspec.json.encode(order))
        command = [sys.executable, "-m", "rollart.bench.ray_side", str(beside / "order.json")]
        with (beside / "output.txt").open("wb") as output:
            done = subprocess.run(command, cwd=beside, stdout=output, stderr=output, check=False)
        if done.returncode:
            last = ((beside / "output.txt").read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise RunError(f"the measurement {name!r} failed: {last}")
        result: dict[str, Any] = msgspec.json.decode((beside / "result.json").read_bytes())
        return result


@contextmanager
def _trial(nodes: str) -> Iterator[str]:
    cluster = trial_cluster.up(trial_cluster.parse(nodes, CPUS, 0))
    try:
        yield cluster.address
    finally:
        trial_cluster.down()
