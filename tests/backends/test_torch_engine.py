"""What the torch engine owes beyond its port: exactness, sharing, memory, sampling and what an update costs."""

import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
import torch
from parts import PATIENCE_S, TINY, V1, V2, V3, VOCABULARY, Driver, publish, tiny_model
from tokenizers import Tokenizer, models
from transformers import GenerationConfig

from rollart.backends.engines.torch_engine import TorchEngine
from rollart.backends.models import build_model, token_logprobs
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.tensors import pack
from rollart.bench.engine import load_benches
from rollart.types.errors import RequestError
from rollart.types.messages import (
    Abort,
    Add,
    EndSession,
    FinishReason,
    PrefixMiss,
    Progress,
    Refused,
    Resume,
    Sampling,
    Stage,
    Staged,
    StageFailed,
    Suspend,
    TurnDone,
    TurnUsage,
    Update,
    Updated,
)
from rollart.types.tokens import EMPTY, NOTHING, Segment, prefix_digest
from rollart.types.versions import Version

PROMPT = Segment.of(list(range(40, 60)))
TOKEN_MIB = 2 * 2 * 16 * 4 / 2**20
"""KV of one token of the tiny model."""


def engine(store=None, **settings):
    store = store or MemoryStore()
    options = {"model": TINY, "store": store, "max_context": 128, "kv_mib": 1.0, "slots": 8, "progress_interval_s": 1e3}
    driver = Driver(TorchEngine, options | settings)
    driver.store = store
    return driver


def serve(driver, version):
    driver.ask(Stage(publish(driver.store, version)))
    assert driver.ask(Update(version))[-1] == Updated(version)


def served(version=V1, **settings):
    driver = engine(**settings)
    serve(driver, version)
    return driver


def add(request, new=PROMPT, *, session=None, prefix=b"", max_tokens=12, task="t", **sampling):
    return Add(
        request=request,
        session=request if session is None else session,
        task=task,
        prefix_length=len(prefix) // 4,
        prefix_digest=prefix_digest(prefix) if prefix else b"",
        new=new,
        sampling=Sampling(max_tokens, **{"seed": 7, **sampling}),
    )


def logprobs_of(generated):
    return np.frombuffer(generated.logprobs, dtype="<f4")


def training_logprobs(model, context, tokens, temperature=1.0):
    ids = torch.tensor(np.concatenate([context, tokens])).long()
    with torch.no_grad():
        logits = model(ids[None, :-1]).logits[0]
    return token_logprobs(logits, ids[1:], temperature)[-len(tokens) :].numpy()


def check_logprobs(model, context, generated, temperature=1.0):
    expected = training_logprobs(model, context, generated.tokens.ids(), temperature)
    np.testing.assert_allclose(logprobs_of(generated), expected, atol=1e-4)


def same(first, second):
    """The same turn, but for the last bits of its log-probabilities: products round by where memory lies."""
    np.testing.assert_allclose(logprobs_of(first.generated), logprobs_of(second.generated), atol=1e-4)
    blank = msgspec.structs.replace(first.generated, logprobs=second.generated.logprobs)
    return msgspec.structs.replace(first, generated=blank) == second


# --- exactness


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_those_of_a_training_forward(temperature):
    (done,) = served().ask(add(1, temperature=temperature, max_tokens=60))
    assert done.generated.tokens.length == 60
    check_logprobs(tiny_model(1), PROMPT.ids(), done.generated, temperature)


def test_a_long_prompt_in_chunks_beside_others():
    driver = served(prefill_tokens=7)
    long = Segment.of(np.random.default_rng(1).integers(0, VOCABULARY, 100).astype(np.int32))
    driver.send(add(1, max_tokens=30))
    for _ in range(6):
        driver.slice()
    driver.send(add(2, long, max_tokens=20), add(3, max_tokens=9))
    ended = {event.request: event for event in driver.rest()}
    check_logprobs(tiny_model(1), PROMPT.ids(), ended[1].generated)
    check_logprobs(tiny_model(1), long.ids(), ended[2].generated)
    # The long prompt takes 15 steps of prefill; decoding went on beside it.
    assert list(ended).index(1) < list(ended).index(2)


def test_what_is_sampled_does_not_depend_on_what_else_runs():
    (alone,) = served().ask(add(1))
    busy = served(slots=3)
    torch.manual_seed(123)
    others = [add(n, Segment.of([n] * n), seed=n, temperature=n / 5) for n in range(2, 9)]
    everything = busy.ask(*others[:3], add(1), *others[3:])
    assert next(event for event in everything if event.request == 1).generated.tokens == alone.generated.tokens
    (other,) = served().ask(add(1, seed=8))
    assert other.generated.tokens != alone.generated.tokens


def test_a_turn_goes_on_elsewhere_with_the_same_draws():
    (whole,) = served().ask(add(1, max_tokens=20))
    context = PROMPT.payload + whole.generated.tokens.payload[: 8 * 4]
    (rest,) = served().ask(add(1, Segment(28, context), max_tokens=12))
    assert rest.generated.tokens.payload == whole.generated.tokens.payload[8 * 4 :]


def test_the_seed_of_the_process_is_left_alone():
    driver = served()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    driver.ask(add(1))
    assert torch.equal(torch.rand(1), expected)


# --- sampling


def test_a_stop_token_is_the_last_token():
    driver = served()
    (free,) = driver.ask(add(1, max_tokens=20))
    tokens = free.generated.tokens.ids().tolist()
    (done,) = driver.ask(add(2, max_tokens=20, stop_tokens=(tokens[10],)))
    assert done.finish is FinishReason.STOP
    assert done.generated.tokens.ids().tolist() == tokens[: tokens.index(tokens[10]) + 1]


def test_top_k_and_top_p_are_honoured():
    driver = served()
    (greedy,) = driver.ask(add(1, temperature=0.0))
    (one,) = driver.ask(add(2, top_k=1))
    (narrow,) = driver.ask(add(3, top_p=1e-6))
    assert greedy.generated.tokens == one.generated.tokens == narrow.generated.tokens
    check_logprobs(tiny_model(1), PROMPT.ids(), one.generated)


def test_a_stop_string_ends_a_turn(tmp_path):
    tiny_model(1).save_pretrained(tmp_path)
    vocabulary = {chr(0x4E00 + index): index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0x4E00)))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    driver = served(model=str(tmp_path))
    (free,) = driver.ask(add(1, max_tokens=20))
    tokens = free.generated.tokens.ids().tolist()
    text = tokenizer.decode(tokens[6:9])
    (done,) = driver.ask(add(2, max_tokens=20, stop_strings=("never", text)))
    assert done.finish is FinishReason.STOP
    assert done.generated.tokens.ids().tolist() == tokens[:9]


def test_what_can_never_be_served_is_refused():
    driver = engine()
    (refused,) = driver.ask(add(1))
    assert "no weights" in refused.reason
    serve(driver, V1)
    (done,) = driver.ask(add(1))  # a refused request may come again
    assert isinstance(done, TurnDone)
    for bad, reason in (
        (add(2, Segment.of([5] * 128)), "128 tokens"),
        (add(2, EMPTY), "0 tokens"),
        (add(2, Segment.of([VOCABULARY])), "vocabulary"),
        (add(2, Segment(5)), "simulated"),
        (add(2, max_tokens=0), "sample"),
        (add(2, temperature=-1.0), "sample"),
        (add(2, top_p=0.0), "top_p"),
        (add(2, top_k=-1), "top_k"),
        (add(2, stop_strings=("x",)), "tokenizer"),
    ):
        (refused,) = driver.ask(bad)
        assert isinstance(refused, Refused)
        assert reason in refused.reason


# --- sessions and memory


def test_a_session_sends_only_what_is_new():
    driver = served()
    (first,) = driver.ask(add(1, session=1))
    assert first.usage == TurnUsage(prefilled=20)
    held = PROMPT.payload + first.generated.tokens.payload
    new = Segment.of([1, 2, 3])
    (second,) = driver.ask(add(2, new, prefix=held, session=1))
    # The last sampled token was never fed to the model: its KV is new too.
    assert second.usage == TurnUsage(prefilled=4, cached=31)
    check_logprobs(tiny_model(1), np.frombuffer(held + new.payload, dtype="<i4"), second.generated)
    # A prefix of what is held is held too: the controller may go back to where it was.
    (again,) = driver.ask(add(3, new, prefix=held, session=1))
    assert again.generated.tokens == second.generated.tokens


def test_a_group_prefills_its_prompt_once():
    driver = served()
    prompt = Segment.of(np.random.default_rng(0).integers(0, VOCABULARY, 40).astype(np.int32))
    driver.send(*[add(n, prompt, seed=n, max_tokens=3 + n) for n in range(1, 9)])
    ended = {event.request: event for event in driver.rest()}
    assert ended[1].usage == TurnUsage(prefilled=40)
    # The last token of a prompt is computed by everyone: its logits are needed.
    assert [ended[n].usage for n in range(2, 9)] == [TurnUsage(prefilled=1, cached=39)] * 7
    counted = driver.worker.counters().tasks["t"]
    assert (counted.cached_tokens, counted.prefill_tokens) == (7 * 39, 40 + 7)
    for event in ended.values():
        check_logprobs(tiny_model(1), prompt.ids(), event.generated)
    # A common beginning is shared too, also with a session that is idle.
    (later,) = driver.ask(add(9, Segment.of([*prompt.ids()[:30], 5, 6])))
    assert later.usage == TurnUsage(prefilled=2, cached=30)


def test_what_members_of_a_group_are_told_again_is_computed_once():
    driver = served()
    prompt = Segment.of(np.random.default_rng(0).integers(0, VOCABULARY, 40).astype(np.int32))
    driver.send(*[add(n, prompt, session=n, seed=7, max_tokens=2) for n in (1, 2, 3)])
    first = {event.request: event for event in driver.rest()}
    held = prompt.payload + first[1].generated.tokens.payload
    assert first[2].generated.tokens == first[1].generated.tokens
    told, otherwise = Segment.of([5, 6, 7, 8, 9]), Segment.of([9, 8, 7, 6, 5])
    driver.send(*[add(10 + n, told if n < 3 else otherwise, prefix=held, session=n, max_tokens=2) for n in (1, 2, 3)])
    second = {event.request: event for event in driver.rest()}
    # The second token that was sampled had no KV, nor has what is new; the last token is computed by everyone.
    assert [second[n].usage for n in (11, 12, 13)] == [
        TurnUsage(prefilled=6, cached=41),
        TurnUsage(prefilled=1, cached=46),
        TurnUsage(prefilled=6, cached=41),
    ]
    for n, new in ((11, told), (12, told), (13, otherwise)):
        check_logprobs(tiny_model(1), np.frombuffer(held + new.payload, dtype="<i4"), second[n].generated)
    # After an update their common beginnings are computed once more, by the first who comes.
    serve(driver, V2)
    held += told.payload + second[11].generated.tokens.payload
    driver.send(*[add(20 + n, told, prefix=held, session=n, max_tokens=2) for n in (1, 2)])
    third = {event.request: event for event in driver.rest()}
    assert third[21].usage == TurnUsage(prefilled=6, recomputed=48)
    assert third[22].usage == TurnUsage(prefilled=1, cached=len(held) // 4 + 4)
    driver.worker.check()


def test_a_small_version_is_staged_within_one_step(monkeypatch):
    """It is fetched during a step, prepared after it, and told before the next one."""
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


def test_a_shared_prompt_survives_the_one_that_computed_it():
    prompt = Segment.of(np.random.default_rng(0).integers(0, VOCABULARY, 60).astype(np.int32))
    driver = served(prefill_tokens=8)
    driver.send(add(1, prompt), add(2, prompt), add(3, prompt, seed=3))
    driver.slice()
    driver.slice()
    driver.send(EndSession(1))
    _, *ended = driver.rest()
    for event in ended:
        check_logprobs(tiny_model(1), prompt.ids(), event.generated)


def test_the_least_recently_used_session_goes_first():
    # Room for four blocks of 32 tokens.
    driver = served(kv_mib=128 * TOKEN_MIB)
    logs = {}
    for session in (1, 2, 3, 4):
        (done,) = driver.ask(add(session, Segment.of([session] * 5), session=session))
        logs[session] = Segment.of([session] * 5).payload + done.generated.tokens.payload
    (kept,) = driver.ask(add(5, Segment.of([1]), session=1, prefix=logs[1], max_tokens=2))
    assert kept.usage.cached == 16
    driver.ask(add(6, Segment.of([9] * 5), session=9))
    assert driver.ask(add(7, Segment.of([1]), session=2, prefix=logs[2])) == [PrefixMiss(7)]
    (kept,) = driver.ask(add(8, Segment.of([1]), session=3, prefix=logs[3], max_tokens=2))
    assert kept.usage.cached == 16
    counters = driver.worker.counters()
    assert (counters.evicted_sessions, counters.prefix_misses) == (1, 1)


def test_full_memory_makes_requests_wait_and_all_of_them_end():
    driver = served(kv_mib=128 * TOKEN_MIB)
    driver.send(*[add(n, Segment.of([n] * 20), seed=n, max_tokens=40) for n in range(1, 8)])
    ended = driver.rest()
    assert sorted(event.request for event in ended) == list(range(1, 8))
    for event in ended:
        check_logprobs(tiny_model(1), [event.request] * 20, event.generated)
    counters = driver.worker.counters()
    assert counters.largest_batch == 2  # a block of 64 tokens each
    assert counters.stalled_steps > 0


def test_a_growing_session_moves_with_its_kv():
    driver = served()
    (first,) = driver.ask(add(1, session=1, max_tokens=10))
    held = PROMPT.payload + first.generated.tokens.payload
    (second,) = driver.ask(add(2, Segment.of([3, 4]), session=1, prefix=held, max_tokens=60))
    assert second.usage == TurnUsage(prefilled=3, cached=29)
    check_logprobs(tiny_model(1), [*np.frombuffer(held, dtype="<i4"), 3, 4], second.generated)


def test_the_context_is_no_longer_than_the_memory():
    driver = served(kv_mib=96 * TOKEN_MIB, max_context=128)
    assert driver.worker.info().max_context == 64
    (refused,) = driver.ask(add(1, Segment.of([5] * 64)))
    assert "KV memory" in refused.reason
    (done,) = driver.ask(add(1, Segment.of([5] * 60), max_tokens=50))
    assert (done.finish, done.generated.tokens.length) == (FinishReason.LENGTH, 4)


# --- commands


def test_doubles_are_ignored():
    driver = served()
    assert len(driver.ask(add(1), add(1))) == 1
    assert driver.ask(add(1)) == []
    assert driver.ask(Abort(1), Abort(99), EndSession(55)) == []


def test_an_abort_gives_what_was_generated_and_costs_the_others_nothing():
    driver = served()
    whole, other = driver.ask(add(1, max_tokens=40), add(2, seed=2))
    driver.send(add(3, max_tokens=40), add(4, seed=2), add(5))
    for _ in range(8):
        driver.slice()
    driver.send(Abort(3), EndSession(5))
    aborted, ended, kept = driver.rest()
    assert (aborted.request, aborted.finish) == (3, FinishReason.ABORTED)
    sampled = aborted.generated.tokens.payload
    assert 0 < len(sampled) < 40 * 4
    assert whole.generated.tokens.payload.startswith(sampled) or other.generated.tokens.payload.startswith(sampled)
    assert (ended.request, ended.finish) == (5, FinishReason.ABORTED)
    assert (kept.request, kept.finish) == (4, FinishReason.LENGTH)


def test_a_newer_request_of_a_session_ends_the_older():
    first, second = served().ask(add(1, session=1), add(2, session=1))
    assert (first.request, first.finish, first.generated) == (1, FinishReason.ABORTED, NOTHING)
    assert (second.request, second.finish) == (2, FinishReason.LENGTH)


def test_progress_and_the_end_add_up():
    (quiet,) = served().ask(add(1))
    events = served(progress_interval_s=1e-6).ask(add(1))
    done = events.pop()
    assert events
    assert all(isinstance(event, Progress) for event in events)
    whole = NOTHING
    for event in events:
        for request, part in event.parts:
            assert request == 1
            whole = whole.then(part)
    assert same(msgspec.structs.replace(done, generated=whole.then(done.generated)), quiet)


def test_progress_says_what_steps_took_and_what_of_that_an_update_cost():
    driver = served(progress_interval_s=1e-6)
    began = time.perf_counter()
    driver.send(add(1, max_tokens=30))
    for _ in range(4):
        driver.slice()
    before = [event for event in driver.take() if isinstance(event, Progress)]
    driver.ask(Suspend(), Stage(publish(driver.store, V2)))
    after = [event for event in driver.ask(Update(V2), Resume()) if isinstance(event, Progress)]
    passed_s = time.perf_counter() - began
    assert all(event.stepping_s > 0 for event in before + after)
    assert sum(event.stepping_s for event in before + after) < passed_s
    assert not any(event.recompute_s for event in before)
    again = [event for event in after if event.recompute_s]
    assert len(again) == 1  # in the step after the update
    assert again[0].recompute_s <= again[0].stepping_s


def test_who_is_idle_now_and_then_reports_all_the_same():
    driver = served(progress_interval_s=0.02)
    reports = []
    deadline = time.monotonic() + PATIENCE_S
    request = 0
    while not reports and time.monotonic() < deadline:
        request += 1
        events = driver.ask(add(request, max_tokens=2))
        reports = [event for event in events if isinstance(event, Progress)]
    assert reports[0].stepping_s > 0


def test_counters_say_what_was_done():
    driver = served()
    driver.ask(add(1, task="a", max_tokens=5), add(2, Segment.of([1, 2]), task="b", max_tokens=3))
    counters = driver.worker.counters()
    assert (counters.tasks["a"].prefill_tokens, counters.tasks["a"].decode_tokens) == (20, 5)
    assert (counters.tasks["b"].prefill_tokens, counters.tasks["b"].decode_tokens) == (2, 3)
    assert counters.tasks["a"].prefill_s > 0
    assert counters.tasks["a"].decode_s > 0
    assert (counters.steps, counters.batch_requests, counters.batch_tokens) == (5, 8, 28)
    assert (counters.largest_batch, counters.updates) == (2, 1)
    driver.ask(add(3, task="a"))
    assert counters.steps == 5  # a copy


# --- updates


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


# --- models


def test_a_checkpoint_folder_is_a_model_and_its_sampling_defaults_do_not_count(tmp_path):
    model = tiny_model(1)
    model.generation_config = GenerationConfig(do_sample=True, top_k=2, repetition_penalty=5.0)
    model.save_pretrained(tmp_path)
    driver = served(model=str(tmp_path))
    assert same(*driver.ask(add(1)), *served().ask(add(1)))


@pytest.mark.parametrize("shard", ["10GB", "20KB"])
def test_a_folder_can_serve_its_own_weights(tmp_path, shard):
    tiny_model(1).save_pretrained(tmp_path, max_shard_size=shard)
    driver = engine(model=str(tmp_path), serve_folder_as=(0, 1))
    assert same(*driver.ask(add(1)), *served().ask(add(1)))
    with pytest.raises(RequestError, match="serve_folder_as"):
        engine(serve_folder_as=(0, 1))


def test_a_broken_checkpoint_is_refused(tmp_path):
    tiny_model(1).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(RequestError, match="cannot be read"):
        engine(model=str(tmp_path), serve_folder_as=(0, 1))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(RequestError, match="neither"):
        engine(model=str(tmp_path), serve_folder_as=(0, 1))


def test_a_model_that_cannot_be_served():
    with pytest.raises(RequestError, match="does not support"):
        engine(model={"config": {"model_type": "mamba"}})


def test_bfloat16_generates():
    (done,) = served(dtype="bfloat16").ask(add(1, max_tokens=30))
    expected = training_logprobs(tiny_model(1), PROMPT.ids(), done.generated.tokens.ids())
    assert np.abs(logprobs_of(done.generated) - expected).mean() < 0.1


COLD = """
import sys, time
import torch
began = time.process_time()  # shared machines: CPU seconds
from rollart.backends.engines.torch_engine import TorchEngine
from rollart.types.messages import Add, Sampling
from rollart.types.tokens import Segment
engine = TorchEngine({"model": sys.argv[1], "store": None, "serve_folder_as": (0, 1)}, lambda: None)
engine.post([Add(1, 1, "t", 0, b"", Segment.of(list(range(50))), Sampling(1))])
while not (events := engine.advance(0.0).events):
    pass
assert events[0].generated.tokens.length == 1, events
assert "transformers" not in sys.modules
print(time.process_time() - began)
"""


def test_a_cold_process_gives_its_first_token_soon(tmp_path):
    build_model({"config": load_benches()["1M"].config}, dtype="float32", device="cpu").save_pretrained(tmp_path)
    done = subprocess.run([sys.executable, "-c", COLD, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 3.0


def test_versions_of_another_epoch_follow():
    driver = served(V3)
    serve(driver, Version(1, 1))
    (done,) = driver.ask(add(1))
    assert [run.version for run in done.generated.runs] == [Version(1, 1)]
