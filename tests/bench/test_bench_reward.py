"""`rollart bench reward`: the trace, the figures, and a short run."""

import json
import subprocess

import pytest
from real_cli import COMMAND

from rollart.bench.common import read_tables
from rollart.bench.reward_run import Answered, figures, trace_of
from rollart.types.messages import Scored, ScoreFailed
from rollart.types.reward_use import RewardUse


def test_the_committed_trace_has_5000_calls_and_long_pauses():
    tables = read_tables("reward.toml")
    trace = trace_of(tables["trace"])
    assert len(trace.arrivals) == 5000
    work_s = sum(arrival.work_s for arrival in trace.arrivals)
    # What a pool that is always there could reach at best; 3 × this is what the platform has to reach.
    assert work_s / (tables["platform"]["max_replicas"] * trace.length_s) < 0.2
    assert trace == trace_of(tables["trace"]), "the same every time"
    assert len(trace_of(tables["trace"], 0.1).arrivals) == 500


def answered(number, took_s, *, work_s=1.0, cold=0, alone=True):
    return Answered(Scored(f"{number}/work", (work_s,)), RewardUse(cold_starts=cold), took_s, alone)


def test_figures_by_hand():
    report = {"executed": 5, "replica_s": 10.0, "max_replicas": 2, "cold_starts": 1}
    calls = [answered(1, 9.0, cold=1), answered(2, 1.004), answered(3, 1.002), answered(4, 5.0, alone=False)]
    result = figures([*calls, Answered(ScoreFailed("5/work", "away"), RewardUse(), 1.0, alone=True)], 6, 100.0, report)
    assert (result["lost"], result["doubled"]) == (2, 0)
    assert result["added_ms_p50"] == pytest.approx(3.0)
    assert (result["paid_over_work"], result["utilisation"]) == (2.5, 0.4)
    assert result["dedicated_utilisation"] == pytest.approx(4 / 200)
    assert result["over_dedicated"] == pytest.approx(20.0)
    assert figures([*calls, calls[0]], 4, 100.0, report)["doubled"] == 2, "one answered twice, one computed twice"


@pytest.mark.long
def test_a_short_run(tmp_path):
    pytest.importorskip("fastapi", reason="Ray Serve is not installed: make test-functions")
    command = [*COMMAND, "bench", "reward", "--calls", "60", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["lost"], result["doubled"]) == (0, 0)
    assert {"added_ms_p50", "paid_over_work", "utilisation", "dedicated_utilisation"} < set(result)
