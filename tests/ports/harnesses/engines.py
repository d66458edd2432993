"""Engines: simulated, reference and torch."""

from collections.abc import Callable

from worker_settings import worker_settings

from harnesses.common import MODEL, TASK, VOCABULARY, corrupt_memory, profile
from rollart.backends.engines.reference import ReferenceEngine
from rollart.backends.engines.torch_engine import TorchEngine
from rollart.backends.models import build_model
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.tensors import pack
from rollart.conformance.engine import EngineHarness
from rollart.sim.engine import SimEngine
from rollart.sim.hardware import TINY, WIDE
from rollart.sim.store import SimStore
from rollart.types.tokens import Segment
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind, bucket_digest


def simulated_engine(kv_on_update: str) -> EngineHarness:
    store = SimStore()
    settings = {
        "hardware": WIDE,
        "model": TINY,
        "ranks": 1,
        "tasks": {TASK: profile()},
        "seed": 5,
        "store": store,
        "pull_gb_s": 1.0,
        "slots": 4,
        "max_context": 2_000,
        "kv_on_update": kv_on_update,
        "progress_interval_s": 0.02,
    }
    return EngineHarness(
        build=lambda wake: SimEngine(settings, wake),
        publish=lambda version: publish_simulated(store, version),
        tokens=lambda count: Segment(count, None),
        virtual=True,
        corrupt=lambda manifest: store.corrupt(manifest.version, 1),
        long_turn=200,
        task=TASK,
    )


def publish_simulated(store: SimStore, version: Version) -> Manifest:
    buckets = [f"{version}/{index}".encode() for index in range(2)]
    manifest = Manifest(
        version=version,
        parent=None,
        kind=WeightKind.FULL,
        tensors=(),
        bucket_bytes=(10_000_000, 10_000_000),
        digests=tuple(bucket_digest(bucket) for bucket in buckets),
    )
    store.publish(manifest, buckets)
    return manifest


def reference_engine() -> EngineHarness:
    store = MemoryStore()
    settings = {
        "model": MODEL,
        "store": store,
        "slots": 3,
        "max_context": 96,
        "chunk_tokens": 4,
        "progress_interval_s": 0.05,
    }
    return EngineHarness(
        build=lambda wake: ReferenceEngine(worker_settings(ReferenceEngine, settings), wake),
        publish=lambda version: publish_real(store, version),
        tokens=lambda count: Segment.of([(7 * index + 3) % VOCABULARY for index in range(count)]),
        virtual=False,
        corrupt=lambda manifest: corrupt_memory(store, manifest.version, 0),
        every_token=tuple(range(VOCABULARY)),
        long_turn=48,
        task=TASK,
    )


def torch_engine(kv_on_update: str) -> EngineHarness:
    store = MemoryStore()
    settings = {
        "model": MODEL,
        "store": store,
        "slots": 3,
        "max_context": 96,
        "kv_mib": 0.25,
        "prefill_tokens": 16,
        "kv_on_update": kv_on_update,
        "progress_interval_s": 0.05,
    }
    return EngineHarness(
        build=lambda wake: TorchEngine(worker_settings(TorchEngine, settings), wake),
        publish=lambda version: publish_real(store, version),
        tokens=lambda count: Segment.of([(7 * index + 3) % VOCABULARY for index in range(count)]),
        virtual=False,
        corrupt=lambda manifest: corrupt_memory(store, manifest.version, 0),
        every_token=tuple(range(VOCABULARY)),
        long_turn=48,
        task=TASK,
    )


def publish_real(store: MemoryStore, version: Version) -> Manifest:
    model = build_model(MODEL, dtype="float32", device="cpu", seed=1000 * version.epoch + version.step)
    manifest, buckets = pack(model.state_dict(), version=version, parent=None, bucket_bytes=8192)
    store.publish(manifest, buckets)
    return manifest


ENGINES: dict[str, Callable[[], EngineHarness]] = {
    "sim-recompute": lambda: simulated_engine("recompute"),
    "sim-keep": lambda: simulated_engine("keep"),
    "reference": reference_engine,
    "torch-recompute": lambda: torch_engine("recompute"),
    "torch-keep": lambda: torch_engine("keep"),
}
