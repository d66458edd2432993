"""The torch engine: exact log-probabilities, sampling, commands and progress."""

import time

import msgspec
import numpy as np
import pytest
import torch
from parts import PATIENCE_S, V1, V2, VOCABULARY, publish, tiny_model
from tokenizers import Tokenizer, models
from torch_engine_parts import PROMPT, add, check_logprobs, engine, same, serve, served

from rollart.types.messages import (
    Abort,
    EndSession,
    FinishReason,
    Progress,
    Refused,
    Resume,
    Stage,
    Suspend,
    TurnDone,
    Update,
)
from rollart.types.tokens import EMPTY, NOTHING, Segment

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


# --- work by task, and slow engines ---------------------------------------------------------------------------------


def work_of(driver, *commands):
    """Work that the engine reports for these requests and for more of their kind, by task."""
    deadline = time.monotonic() + PATIENCE_S
    request, work = 100, []
    events = driver.ask(*commands)
    while not work and time.monotonic() < deadline:
        work = [each for event in events if isinstance(event, Progress) for each in event.work]
        request += 1
        events = driver.ask(add(request, task="more", max_tokens=2))
    return {each.task: each for each in work}


def test_reports_say_what_the_work_of_a_task_took():
    driver = served(progress_interval_s=0.02)
    work = work_of(driver, add(1, task="a", max_tokens=5), add(2, Segment.of([1, 2]), task="b", max_tokens=3))
    assert (work["a"].turns, work["a"].prefill_tokens, work["a"].decode_tokens) == (1, 20, 4)
    assert (work["b"].turns, work["b"].prefill_tokens, work["b"].decode_tokens) == (1, 2, 2)
    assert all(each.prefill_s > 0 and each.decode_s > 0 for each in (work["a"], work["b"]))
    assert work["b"].decode_steps == pytest.approx(1.0), "two tokens, each beside one of the other task"
    assert work["a"].decode_steps == pytest.approx(3.0)
    counted = driver.worker.counters().tasks["a"]
    assert (work["a"].prefill_s, work["a"].decode_s) == pytest.approx((counted.prefill_s, counted.decode_s))


def test_an_engine_can_be_slowed_on_purpose(monkeypatch):
    slept = []
    monkeypatch.setattr("rollart.backends.engines.torch_engine.time.sleep", slept.append)
    driver = served(inject={"prefill": 3.0}, progress_interval_s=0.02)
    work = work_of(driver, add(1, task="a", max_tokens=5))
    assert sum(slept) > 0
    share = work["a"].prefill_s * 2 / 3  # of what it took with the waiting
    assert slept[0] == pytest.approx(share, rel=1e-6)
    slept.clear()
    driver = served(inject={"prefill": 3.0, "from_s": 3600.0}, progress_interval_s=0.02)
    work_of(driver, add(1, task="a", max_tokens=5))
    assert slept == []
