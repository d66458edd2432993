import msgspec
import numpy as np
import pytest
import torch
from parts import TINY, V1, V2, V3, VOCABULARY, Driver, publish, tiny_model
from transformers import GenerationConfig

from rollart.backends.engines.reference import ReferenceEngine
from rollart.backends.engines.sampling import sample_chunk
from rollart.backends.models import token_logprobs
from rollart.backends.stores.memory import MemoryStore
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

PROMPT = Segment.of(list(range(40, 60)))


class Damaged(MemoryStore):
    """Gives wrong bytes for the versions in `bad`, without noticing."""

    def __init__(self):
        super().__init__()
        self.bad = set()

    def bucket(self, version, index):
        data = super().bucket(version, index)
        return b"\xff" + data[1:] if version in self.bad and index == 1 else data


def engine(store=None, **settings):
    store = store or MemoryStore()
    driver = Driver(ReferenceEngine, {"model": TINY, "store": store, "max_context": 128, **settings})
    driver.store = store
    return driver


def serve(driver, version):
    driver.ask(Stage(publish(driver.store, version)))
    assert driver.ask(Update(version))[-1] == Updated(version)


def served(version=V1, **settings):
    driver = engine(**settings)
    serve(driver, version)
    return driver


def add(request, new=PROMPT, *, session=1, prefix=b"", max_tokens=12, temperature=1.0, stop=(), seed=7):
    return Add(
        request=request,
        session=session,
        task="t",
        prefix_length=len(prefix) // 4,
        prefix_digest=prefix_digest(prefix) if prefix else b"",
        new=new,
        sampling=Sampling(max_tokens, temperature, stop, seed),
    )


def logprobs_of(done):
    return np.frombuffer(done.generated.logprobs, dtype="<f4")


def training_logprobs(model, context, tokens, temperature):
    ids = torch.tensor(np.concatenate([context, tokens])).long()
    with torch.no_grad():
        logits = model(ids[None, :-1]).logits[0]
    return token_logprobs(logits, ids[1:], temperature)[-len(tokens) :].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_those_of_a_training_forward(temperature):
    driver = served()
    (done,) = driver.ask(add(1, temperature=temperature, max_tokens=30))
    tokens = done.generated.tokens.ids()
    assert len(tokens) == 30
    expected = training_logprobs(tiny_model(1), PROMPT.ids(), tokens, temperature)
    np.testing.assert_allclose(logprobs_of(done), expected, atol=1e-4)


def test_greedy_takes_the_likeliest_token():
    driver = served()
    (done,) = driver.ask(add(1, temperature=0.0, max_tokens=9))
    ids = torch.tensor(np.concatenate([PROMPT.ids(), done.generated.tokens.ids()])).long()
    with torch.no_grad():
        best = tiny_model(1)(ids[None]).logits[0].argmax(-1)
    assert torch.equal(best[-10:-1], ids[-9:])


def test_sampling_follows_the_softmax():
    driver = served()
    count = 300
    driver.send(*[add(n, session=n, max_tokens=1, seed=n) for n in range(1, count + 1)])
    # On a slow machine there is a `Progress` between them.
    first = [int(done.generated.tokens.ids()[0]) for done in driver.rest() if isinstance(done, TurnDone)]
    with torch.no_grad():
        logits = tiny_model(1)(torch.tensor(PROMPT.ids()).long()[None]).logits[0, -1]
    likely = torch.softmax(logits, -1).topk(5)
    share = sum(first.count(token) for token in likely.indices.tolist()) / count
    assert share == pytest.approx(likely.values.sum().item(), abs=0.1)


def test_what_is_sampled_does_not_depend_on_what_else_runs():
    alone = served()
    (done,) = alone.ask(add(1))
    busy = served(slots=2)
    torch.manual_seed(123)
    everything = busy.ask(add(5, session=5, seed=1), add(1), add(6, session=6, seed=2))
    assert next(event for event in everything if event.request == 1) == done
    (other,) = served().ask(add(1, seed=8))
    assert other.generated != done.generated


def test_chunks_of_a_turn_draw_anew():
    model = tiny_model(1)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token is as likely as any other: only the draw decides
    drawn = {int(sample_chunk(model, PROMPT.ids()[:n], Sampling(1, seed=3), 1).tokens[0]) for n in range(1, 11)}
    assert len(drawn) > 5


def test_the_seed_of_the_process_is_left_alone():
    driver = served()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    driver.ask(add(1))
    assert torch.equal(torch.rand(1), expected)


def test_a_stop_token_is_the_last_token():
    driver = served()
    (free,) = driver.ask(add(1, max_tokens=20))
    tokens = free.generated.tokens.ids().tolist()
    stop = tokens[10]
    (done,) = driver.ask(add(2, session=2, max_tokens=20, stop=(stop,)))
    assert done.finish is FinishReason.STOP
    assert done.generated.tokens.ids().tolist() == tokens[: tokens.index(stop) + 1]


def test_the_context_ends_a_turn():
    driver = served(max_context=24)
    (done,) = driver.ask(add(1, max_tokens=20))
    assert done.finish is FinishReason.LENGTH
    assert done.generated.tokens.length == 4
    whole = PROMPT.payload + done.generated.tokens.payload
    (refused,) = driver.ask(add(2, EMPTY, prefix=whole))
    assert isinstance(refused, Refused)


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
    ):
        (refused,) = driver.ask(bad)
        assert reason in refused.reason


def test_a_session_sends_only_what_is_new():
    driver = served()
    (first,) = driver.ask(add(1))
    assert first.usage == TurnUsage(prefilled=20)
    held = PROMPT.payload + first.generated.tokens.payload
    new = Segment.of([1, 2, 3])
    (second,) = driver.ask(add(2, new, prefix=held))
    assert second.usage == TurnUsage(prefilled=3, cached=32)
    context = np.frombuffer(held + new.payload, dtype="<i4")
    expected = training_logprobs(tiny_model(1), context, second.generated.tokens.ids(), 1.0)
    np.testing.assert_allclose(logprobs_of(second), expected, atol=1e-4)
    # A prefix of what is held is held too: the controller may go back to where it was.
    (again,) = driver.ask(add(3, new, prefix=held))
    assert again.generated == second.generated


def test_a_prefix_that_is_not_held_is_missed():
    driver = served()
    driver.ask(add(1))
    assert driver.ask(add(2, prefix=b"\0" * 80)) == [PrefixMiss(2)]
    assert driver.ask(add(2, prefix=PROMPT.payload, session=9)) == [PrefixMiss(2)]
    (done,) = driver.ask(add(2))
    assert isinstance(done, TurnDone)
    driver.send(EndSession(1))
    assert driver.ask(add(3, prefix=PROMPT.payload)) == [PrefixMiss(3)]


def test_doubles_are_ignored():
    driver = served()
    assert len(driver.ask(add(1), add(1))) == 1
    assert driver.ask(add(1)) == []
    assert driver.ask(Abort(1), Abort(99)) == []


def test_an_abort_gives_what_was_generated():
    driver = served(chunk_tokens=4)
    (whole,) = driver.ask(add(1, max_tokens=40))
    driver.send(add(2, session=2, max_tokens=40), add(3, session=3))
    driver.slice()
    driver.slice()
    driver.slice()
    driver.send(Abort(2), EndSession(3))
    two, three = driver.rest()
    assert (two.request, two.finish) == (2, FinishReason.ABORTED)
    assert two.generated.tokens.payload == whole.generated.tokens.payload[: 8 * 4]
    assert (three.request, three.finish) == (3, FinishReason.ABORTED)


def test_a_newer_request_of_a_session_ends_the_older():
    driver = served()
    first, second = driver.ask(add(1), add(2))
    assert (first.request, first.finish, first.generated) == (1, FinishReason.ABORTED, NOTHING)
    assert (second.request, second.finish) == (2, FinishReason.LENGTH)


def test_suspended_it_takes_no_step_but_obeys():
    driver = served()
    assert driver.ask(Suspend(), add(1)) == []
    manifest = publish(driver.store, V2)
    assert driver.ask(Stage(manifest)) == [Staged(V2)]
    assert driver.ask(Update(V2)) == [Updated(V2)]
    (done,) = driver.ask(Resume())
    assert [run.version for run in done.generated.runs] == [V2]


def test_progress_and_the_end_add_up():
    driver = served(progress_interval_s=1e-6, chunk_tokens=4)
    (quiet,) = served(chunk_tokens=4).ask(add(1))
    events = driver.ask(add(1))
    done = events.pop()
    assert events
    assert all(isinstance(event, Progress) for event in events)
    whole = NOTHING
    for event in events:
        for request, part in event.parts:
            assert request == 1
            whole = whole.then(part)
    assert whole.then(done.generated) == quiet.generated


def test_two_versions_in_one_turn():
    driver = served(chunk_tokens=4)
    driver.send(add(1, max_tokens=12))
    driver.slice()
    # Everything of the version is fetched while the engine is suspended, so that the update comes after one chunk.
    driver.ask(Suspend(), Stage(publish(driver.store, V2)))
    *_, done = driver.ask(Update(V2), Resume())
    assert [(run.version, run.length) for run in done.generated.runs] == [(V1, 4), (V2, 8)]
    assert done.usage == TurnUsage(prefilled=20, recomputed=24)
    tokens = done.generated.tokens.ids()
    old = training_logprobs(tiny_model(1), PROMPT.ids(), tokens, 1.0)
    new = training_logprobs(tiny_model(2), PROMPT.ids(), tokens, 1.0)
    np.testing.assert_allclose(logprobs_of(done), np.concatenate([old[:4], new[4:]]), atol=1e-4)
    assert np.abs(old - new).max() > 0.01


def test_a_session_that_waited_during_an_update_is_recomputed_once():
    driver = served()
    (first,) = driver.ask(add(1))
    serve(driver, V2)
    held = PROMPT.payload + first.generated.tokens.payload
    new = Segment.of([1, 2, 3])
    (second,) = driver.ask(add(2, new, prefix=held))
    assert second.usage == TurnUsage(prefilled=3, recomputed=32)
    held += new.payload + second.generated.tokens.payload
    (third,) = driver.ask(add(3, new, prefix=held))
    assert third.usage == TurnUsage(prefilled=3, cached=47)


def test_an_aborted_turn_recomputes_nothing_it_did_not_need():
    driver = served(chunk_tokens=4)
    driver.send(add(1))
    driver.slice()
    driver.ask(Suspend(), Stage(publish(driver.store, V2)))
    events = driver.ask(Update(V2), Abort(1), Resume())
    assert events[-1].usage == TurnUsage(prefilled=20)


def test_a_wrong_digest_keeps_the_old_version():
    driver = engine(Damaged())
    serve(driver, V1)
    manifest = publish(driver.store, V2)
    driver.store.bad.add(V2)
    (failed,) = driver.ask(Stage(manifest))
    assert isinstance(failed, StageFailed)
    assert "DigestMismatch" in failed.reason
    (failed,) = driver.ask(Update(V2))
    assert isinstance(failed, StageFailed)
    (done,) = driver.ask(add(1))
    assert [run.version for run in done.generated.runs] == [V1]
    expected = training_logprobs(tiny_model(1), PROMPT.ids(), done.generated.tokens.ids(), 1.0)
    np.testing.assert_allclose(logprobs_of(done), expected, atol=1e-4)
    serve(driver, V3)


def test_versions_that_cannot_be_served_are_said_so():
    driver = served(V2)
    manifest = driver.store.manifest(V2)
    assert driver.ask(Stage(manifest), Update(V2)) == [Staged(V2), Updated(V2)]
    (unknown,) = driver.ask(Update(V3))
    assert "not staged" in unknown.reason
    (older,) = driver.ask(Update(V1))
    assert "only grow" in older.reason
    (missing,) = driver.ask(Stage(msgspec.structs.replace(manifest, version=V3)))
    assert "VersionMissing" in missing.reason
    trimmed = tuple(entry for entry in manifest.tensors if entry.name != "model.norm.weight")
    alien = msgspec.structs.replace(publish(driver.store, V3), tensors=trimmed)
    (unfit,) = driver.ask(Stage(alien))
    assert "not for this model" in unfit.reason


def test_a_checkpoint_folder_is_a_model_and_its_sampling_defaults_do_not_count(tmp_path):
    model = tiny_model(1)
    model.generation_config = GenerationConfig(do_sample=True, top_k=2, repetition_penalty=5.0)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "generation_config.json").exists()
    driver = served(model=str(tmp_path))
    assert driver.ask(add(1)) == served().ask(add(1))
