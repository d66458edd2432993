"""Micro-benchmark of the simulated workers, run by hand: `python tests/sim/bench_workers.py`.

Prints µs of CPU per turn of the engine (Add → TurnDone) and per step of an environment, driven as the runtime does.
"""

import heapq
import sys
import time

from sim_parts import TASK, add, profile, prompt, publish

from rollart.sim.engine import SimEngine
from rollart.sim.environment import SimEnvironments
from rollart.sim.hardware import H20, QWEN3_8B
from rollart.sim.store import SimStore
from rollart.types.ids import TrajectoryId
from rollart.types.messages import Observed, Reset, Stage, Step, TurnDone, Update
from rollart.types.tokens import Segment
from rollart.types.versions import Version

PROFILE = profile(
    prompt_tokens={"kind": "lognormal", "median": 1500, "sigma": 0.5},
    observation_tokens={"kind": "lognormal", "median": 300, "sigma": 0.7},
    answer_tokens={"kind": "lognormal", "median": 200, "sigma": 0.8},
    step_s={"kind": "lognormal", "median": 4, "sigma": 0.5},
    step_failure=0.0001,
    turns=30,
)


def engine(concurrent: int, turns: int, progress_interval_s: float) -> float:
    store = SimStore()
    settings = {
        "hardware": H20,
        "model": QWEN3_8B,
        "ranks": 1,
        "tasks": {TASK: PROFILE},
        "seed": 1,
        "store": store,
        "pull_gb_s": 100.0,
        "slots": 64,
        "max_context": 32_000,
        "progress_interval_s": progress_interval_s,
    }
    worker = SimEngine(settings, lambda: None)
    worker.post([Stage(publish(store, Version(0, 0), nominal_bytes=0)), Update(Version(0, 0))])
    worker.advance(0.0)
    worker.post([Update(Version(0, 0))])
    worker.advance(0.0)
    # Each session waits a second for its environment between turns: arrivals come one by one.
    arrivals = [(0.1 * session, session, 0) for session in range(concurrent)]
    heapq.heapify(arrivals)
    session_of: dict[int, int] = {}
    done = requests = 0
    wake: float | None = None
    start = time.process_time()
    while done < turns:
        if arrivals and (wake is None or arrivals[0][0] <= wake):
            now, session, _ = heapq.heappop(arrivals)
            requests += 1
            session_of[requests] = session
            worker.post([add(requests, session, new=1500, max_tokens=4000)])
        else:
            assert wake is not None
            now = wake
        advance = worker.advance(now)
        wake = advance.wake_at
        for event in advance.events:
            if isinstance(event, TurnDone):
                done += 1
                heapq.heappush(arrivals, (now + 1.0, session_of[event.request], done))
    return (time.process_time() - start) / done * 1e6


def environments(slots: int, steps: int) -> float:
    worker = SimEnvironments({"task": TASK, "profile": PROFILE, "slots": slots, "seed": 1}, lambda: None)
    worker.post([Reset(TrajectoryId(slot), slot, prompt(slot), 0) for slot in range(slots)])
    wake = worker.advance(0.0).wake_at
    done, ids = 0, slots
    action = Segment(200, None)
    start = time.process_time()
    while done < steps:
        assert wake is not None
        now = wake
        advance = worker.advance(now)
        wake = advance.wake_at
        for event in advance.events:
            done += 1
            if isinstance(event, Observed) and not event.done:
                worker.post([Step(event.episode, event.turn + 1, action)])
            else:
                ids += 1
                worker.post([Reset(TrajectoryId(ids), event.episode % slots, prompt(ids), 0)])
        if advance.events:
            wake = worker.advance(now).wake_at
    return (time.process_time() - start) / done * 1e6


def main() -> None:
    for concurrent in (8, 32, 64, 256):
        for interval_s in (5.0, 60.0):
            us = engine(concurrent, 40_000, interval_s)
            sys.stdout.write(f"engine, {concurrent} sessions, progress every {interval_s:g} s: {us:.1f} µs per turn\n")
    sys.stdout.write(f"environments, 1,000 slots: {environments(1_000, 200_000):.1f} µs per step\n")


if __name__ == "__main__":
    main()
