"""The torch engine's sessions: shared prefixes, eviction and full memory."""

import numpy as np
from parts import V2, VOCABULARY, tiny_model
from torch_engine_parts import PROMPT, TOKEN_MIB, add, check_logprobs, serve, served

from rollart.types.messages import EndSession, FinishReason, PrefixMiss, TurnUsage
from rollart.types.tokens import Segment


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
    shared, otherwise = Segment.of([5, 6, 7, 8, 9]), Segment.of([9, 8, 7, 6, 5])
    driver.send(*[add(10 + n, shared if n < 3 else otherwise, prefix=held, session=n, max_tokens=2) for n in (1, 2, 3)])
    second = {event.request: event for event in driver.rest()}
    # The second token that was sampled had no KV, nor has what is new; the last token is computed by everyone.
    assert [second[n].usage for n in (11, 12, 13)] == [
        TurnUsage(prefilled=6, cached=41),
        TurnUsage(prefilled=1, cached=46),
        TurnUsage(prefilled=6, cached=41),
    ]
    for n, new in ((11, shared), (12, shared), (13, otherwise)):
        check_logprobs(tiny_model(1), np.frombuffer(held + new.payload, dtype="<i4"), second[n].generated)
    # After an update their common beginnings are computed once more, by the first request.
    serve(driver, V2)
    held += shared.payload + second[11].generated.tokens.payload
    driver.send(*[add(20 + n, shared, prefix=held, session=n, max_tokens=2) for n in (1, 2)])
    third = {event.request: event for event in driver.rest()}
    assert third[21].usage == TurnUsage(prefilled=6, recomputed=48)
    assert third[22].usage == TurnUsage(prefilled=1, cached=len(held) // 4 + 4)
    driver.worker.check()


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
