"""Small simulated parts and a driver that jumps from `wake_at` to `wake_at`."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollart.ports.worker import Worker
from rollart.sim.engine import SimEngine
from rollart.sim.hardware import TINY, Hardware
from rollart.sim.store import SimStore
from rollart.sim.workload import TaskProfile
from rollart.types.ids import PromptId, RequestId, TrajectoryId
from rollart.types.messages import Add, Sampling, Stage, Update, WorkerCommand, WorkerEvent
from rollart.types.tokens import Segment
from rollart.types.trajectory import Prompt
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind, bucket_digest

TASK = "game"
DEVICE = Hardware(
    name="device", tflops=0.1, hbm_gb=1.0, hbm_tb_s=0.04, nvlink_gb_s=10.0, cost=1.0, step_overhead_s=0.0005
)


def profile(**changes: Any) -> TaskProfile:
    values: dict[str, Any] = {
        "prompt_tokens": 20,
        "observation_tokens": {"kind": "uniform", "low": 5, "high": 15},
        "answer_tokens": {"kind": "lognormal", "median": 30, "sigma": 0.6, "max": 200},
        "turns": {"kind": "uniform", "low": 2, "high": 6},
        "reset_s": {"kind": "normal", "mean": 2.0, "sigma": 1.0, "tail_share": 0.05, "tail": 50.0},
        "step_s": {"kind": "uniform", "low": 0.5, "high": 1.5},
        "reward_s": 0.25,
    }
    return TaskProfile.model_validate(values | changes)


def publish(store: SimStore, version: Version, nominal_bytes: int = 1_000_000_000) -> Manifest:
    """Two nominal buckets with a few real bytes each."""
    buckets = [f"{version}/{index}".encode() for index in range(2)]
    manifest = Manifest(
        version=version,
        parent=None,
        kind=WeightKind.FULL,
        tensors=(),
        bucket_bytes=(nominal_bytes // 2, nominal_bytes // 2),
        digests=tuple(bucket_digest(bucket) for bucket in buckets),
    )
    store.publish(manifest, buckets)
    return manifest


def engine_settings(store: SimStore, **changes: Any) -> Mapping[str, Any]:
    return {
        "hardware": DEVICE,
        "model": TINY,
        "ranks": 1,
        "tasks": {TASK: profile()},
        "seed": 11,
        "store": store,
        "pull_gb_s": 1.0,
        "slots": 4,
        "max_context": 4_000,
        "kv_on_update": "recompute",
        "progress_interval_s": 0.05,
    } | changes


def add(request: int, session: int, *, prefix: int = 0, new: int = 20, max_tokens: int = 500, seed: int = 0) -> Add:
    return Add(
        request=RequestId(request),
        session=TrajectoryId(session),
        task=TASK,
        prefix_length=prefix,
        prefix_digest=b"",
        new=Segment(new, None),
        sampling=Sampling(max_tokens=max_tokens, seed=seed or request),
    )


def prompt(seed: int) -> Prompt:
    return Prompt(id=PromptId(str(seed)), task=TASK, seed=seed)


class Driver:
    """One worker in virtual time. `log` holds (time, event)."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.now = 0.0
        self.wake_at: float | None = None
        self.log: list[tuple[float, WorkerEvent]] = []

    def send(self, *commands: WorkerCommand) -> list[WorkerEvent]:
        """Post, and give what is answered at once."""
        self.worker.post(commands)
        return self._advance()

    def run(self, until: float | None = None) -> Sequence[tuple[float, WorkerEvent]]:
        """Go on until nothing more is due (by `until`); gives the log so far."""
        while self.wake_at is not None and (until is None or self.wake_at <= until):
            self.now = max(self.now, self.wake_at)
            self._advance()
        if until is not None:
            self.now = max(self.now, until)
        return self.log

    def events(self, kind: type[Any]) -> list[Any]:
        return [event for _, event in self.log if isinstance(event, kind)]

    def _advance(self) -> list[WorkerEvent]:
        advance = self.worker.advance(self.now)
        events, self.wake_at = advance.events, advance.wake_at
        self.log += [(self.now, event) for event in events]
        return events


def serving(store: SimStore | None = None, **changes: Any) -> tuple[Driver, SimStore]:
    """An engine with version 0.0 in service."""
    store = store or SimStore()
    driver = Driver(SimEngine(engine_settings(store, **changes), lambda: None))
    update(driver, store, Version(0, 0))
    return driver, store


def update(driver: Driver, store: SimStore, version: Version) -> None:
    """Publish and take into service within the moment: the nominal size is nothing."""
    driver.send(Stage(publish(store, version, nominal_bytes=0)))
    driver.send()
    driver.send(Update(version))
