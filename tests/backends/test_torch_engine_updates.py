"""Weight updates of the torch engine: what is recomputed, what is refused, what an update costs."""

import time

import msgspec
import numpy as np
import torch
from parts import PATIENCE_S, V1, V2, V3, VOCABULARY, Driver, publish, tiny_model
from torch_engine_parts import PROMPT, add, check_logprobs, logprobs_of, serve, served, training_logprobs

from rollart.backends.engines.torch_engine import TorchEngine
from rollart.backends.models import build_model
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.tensors import pack
from rollart.bench.engine import load_benches
from rollart.types.messages import (
    Abort,
    Resume,
    Stage,
    Staged,
    StageFailed,
    Suspend,
    TurnDone,
    TurnUsage,
    Update,
    Updated,
)
from rollart.types.tokens import Segment
from rollart.types.versions import Version


def test_two_versions_in_one_turn():
    driver = served()
    driver.send(add(1, max_tokens=12))
    for _ in range(4):
        driver.slice()
    driver.ask(Suspend(), Stage(publish(driver.store, V2)))
    *_, done = driver.ask(Update(V2), Resume())
    assert [(run.version, run.length) for run in done.generated.runs] == [(V1, 4), (V2, 8)]
    assert done.usage == TurnUsage(prefilled=20, recomputed=23)
    tokens = done.generated.tokens.ids()
    old = training_logprobs(tiny_model(1), PROMPT.ids(), tokens)
    new = training_logprobs(tiny_model(2), PROMPT.ids(), tokens)
    np.testing.assert_allclose(logprobs_of(done.generated), np.concatenate([old[:4], new[4:]]), atol=1e-4)
    assert np.abs(old - new).max() > 0.01


def test_a_group_in_flight_recomputes_its_prompt_once():
    driver = served()
    prompt = Segment.of(np.random.default_rng(0).integers(0, VOCABULARY, 40).astype(np.int32))
    driver.send(*[add(n, prompt, seed=n, max_tokens=20) for n in range(1, 5)])
    for _ in range(8):
        driver.slice()
    driver.ask(Suspend(), Stage(publish(driver.store, V2)))
    ended = {event.request: event for event in driver.ask(Update(V2), Resume()) if isinstance(event, TurnDone)}
    assert ended[1].usage.recomputed > 40
    assert max(ended[n].usage.recomputed for n in (2, 3, 4)) < 20
    for event in ended.values():
        split = event.generated.runs[0].length
        tokens = event.generated.tokens.ids()
        expected = training_logprobs(tiny_model(2), prompt.ids(), tokens)[split:]
        np.testing.assert_allclose(logprobs_of(event.generated)[split:], expected, atol=1e-4)


def test_kept_kv_is_not_computed_again():
    driver = served(kv_on_update="keep")
    driver.send(add(1, max_tokens=12))
    for _ in range(4):
        driver.slice()
    driver.ask(Suspend(), Stage(publish(driver.store, V2)))
    *_, done = driver.ask(Update(V2), Resume())
    assert [run.version for run in done.generated.runs] == [V1, V2]
    assert done.usage == TurnUsage(prefilled=20)


def test_a_session_that_waited_during_an_update_is_recomputed_once():
    driver = served()
    (first,) = driver.ask(add(1, session=1))
    serve(driver, V2)
    held = PROMPT.payload + first.generated.tokens.payload
    new = Segment.of([1, 2, 3])
    (second,) = driver.ask(add(2, new, prefix=held, session=1))
    assert second.usage == TurnUsage(prefilled=4, recomputed=31)
    check_logprobs(tiny_model(2), np.frombuffer(held + new.payload, dtype="<i4"), second.generated)
    held += new.payload + second.generated.tokens.payload
    (third,) = driver.ask(add(3, new, prefix=held, session=1))
    assert third.usage == TurnUsage(prefilled=4, cached=46)


def test_an_aborted_turn_recomputes_nothing_it_did_not_need():
    driver = served()
    driver.send(add(1))
    driver.slice()
    driver.ask(Suspend(), Stage(publish(driver.store, V2)))
    events = driver.ask(Update(V2), Abort(1), Resume())
    assert events[-1].usage == TurnUsage(prefilled=20)


def test_versions_that_cannot_be_served_are_said_so():
    driver = served(V2)
    manifest = driver.store.manifest(V2)
    assert driver.ask(Stage(manifest), Update(V2)) == [Staged(V2), Updated(V2)]
    (unknown,) = driver.ask(Update(V3))
    assert "not staged" in unknown.reason
    (older,) = driver.ask(Update(V1))
    assert "only grow" in older.reason
    trimmed = tuple(entry for entry in manifest.tensors if entry.name != "model.norm.weight")
    alien = msgspec.structs.replace(publish(driver.store, V3), tensors=trimmed)
    (unfit,) = driver.ask(Stage(alien))
    assert "not for this model" in unfit.reason


def test_weights_that_are_not_finite_are_not_staged():
    driver = served()
    model = tiny_model(2)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    manifest, buckets = pack(model.state_dict(), version=V2, parent=None, bucket_bytes=8192)
    driver.store.publish(manifest, buckets)
    (failed,) = driver.ask(Stage(manifest))
    assert isinstance(failed, StageFailed)
    assert "non-finite" in failed.reason
    (done,) = driver.ask(add(1))
    assert [run.version for run in done.generated.runs] == [V1]


def test_an_update_with_64_requests_in_flight_stalls_for_a_moment():
    """10M parameters: what is fused was fused while the old version served, so the update only names it."""
    config = load_benches()["10M"].config
    store = MemoryStore()
    settings = {"model": {"config": config}, "store": store, "slots": 64, "max_context": 128}
    driver = Driver(TorchEngine, {**settings, "kv_mib": 64.0, "prefill_tokens": 1024, "progress_interval_s": 1e3})
    for version in (V1, V2):
        model = build_model({"config": config}, dtype="float32", device="cpu", seed=version.step)
        manifest, buckets = pack(model.state_dict(), version=version, parent=None, bucket_bytes=64 * 2**20)
        store.publish(manifest, buckets)
    driver.ask(Stage(store.manifest(V1)))
    driver.ask(Update(V1))
    random = np.random.default_rng(0)
    driver.send(*[add(n, Segment.of(random.integers(0, 4096, 8).astype(np.int32)), seed=n) for n in range(1, 65)])
    for _ in range(3):
        driver.slice()
    driver.ask(Suspend(), Stage(store.manifest(V2)))
    began_s = time.process_time()
    driver.send(Update(V2))
    driver.slice()  # suspended: the update and nothing else
    assert time.process_time() - began_s < 0.020
    driver.send(Resume())
    done = [event for event in driver.rest() if isinstance(event, TurnDone)]
    assert len(done) == 64
    assert all([run.version for run in event.generated.runs] == [V1, V2] for event in done)
    assert all(sum(run.length for run in event.generated.runs) == 12 for event in done)
    assert all(event.usage.recomputed for event in done)
    assert driver.worker.counters().update_s < 0.020


def test_a_small_version_is_staged_within_one_step(monkeypatch):
    """It is fetched during a step, prepared after it, and reported before the next one."""
    monkeypatch.setattr("rollart.backends.engines.staging.SLICE_S", 60.0)
    driver = served()
    driver.send(add(1, max_tokens=60))
    driver.slice()
    before = driver.worker.counters().steps
    driver.woken.clear()
    model = tiny_model(2).state_dict()
    manifest, buckets = pack(model, version=V2, parent=None, bucket_bytes=2**20)
    driver.store.publish(manifest, buckets)
    driver.send(Stage(manifest))
    driver.slice()
    assert driver.woken.wait(PATIENCE_S)
    driver.slice()
    assert driver.take() == [Staged(V2)]
    assert driver.worker.counters().steps == before + 1


def test_versions_of_another_epoch_follow():
    driver = served(V3)
    serve(driver, Version(1, 1))
    (done,) = driver.ask(add(1))
    assert [run.version for run in done.generated.runs] == [Version(1, 1)]
