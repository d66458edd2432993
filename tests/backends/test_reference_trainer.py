import math

import numpy as np
import pytest
import torch
from parts import TINY, V1, V2, V3, VOCABULARY, Driver, tiny_model

from rollart.backends.engines.sampling import sample_chunk
from rollart.backends.models import build_model, token_logprobs
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.tensors import unpack
from rollart.backends.trainers.reference import ReferenceTrainer
from rollart.types.errors import RequestError
from rollart.types.messages import Publish, Published, Sampling, Train, Trained, TrainerFailed
from rollart.types.tokens import Generated, Segment, TokenSequence, VersionRun
from rollart.types.trajectory import TrainSample, Turn
from rollart.types.versions import Version

SETTINGS = {"model": TINY, "learning_rate": 1e-3, "bucket_bytes": 16384}


def sequence(seed, *, turns=2, model=None):
    """A conversation that the initial model really had."""
    model = model or tiny_model(0)
    log = TokenSequence()
    for turn in range(turns):
        log.append_context(Segment.of([(seed + 5 * index + turn) % 256 for index in range(10)]))
        tokens, logprobs = sample_chunk(model, log.whole().ids(), Sampling(6, seed=seed), 6)
        log.append_sampled(Generated(Segment.of(tokens), logprobs.tobytes(), (VersionRun(V1, tokens.size),)))
    return log


def sample(seed, advantage, *, masked=False, log=None):
    log = log or sequence(seed)
    return TrainSample(seed, 1, "t", (log,), (Turn(log.sampled, advantage),), 0.0, masked)


def batch(number=0):
    return tuple(sample(10 * number + index, advantage) for index, advantage in enumerate((1.0, -1.0, 0.5, -0.5)))


def trainer(store=None, **settings):
    driver = Driver(ReferenceTrainer, {**SETTINGS, "store": store or MemoryStore(), **settings})
    driver.model = driver.worker._model
    return driver


def weights(driver):
    return {name: tensor.clone() for name, tensor in driver.model.state_dict().items()}


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def action_logprob(model, log):
    ids = torch.tensor(log.whole().ids()).long()
    with torch.no_grad():
        logprobs = token_logprobs(model(ids[None, :-1]).logits[0], ids[1:], 1.0)
    return logprobs[torch.tensor(log.action_mask()[1:])].mean().item()


def test_metrics_before_the_first_step_show_an_engine_that_agrees():
    (done,) = trainer().ask(Train(1, V1, batch()))
    assert done.metrics["mismatch"] <= 1e-4
    assert done.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert done.metrics["loss"] == pytest.approx(0.0, abs=1e-4)  # advantages of equal lengths add up to 0
    assert done.metrics["mismatch_kl"] <= 1e-6
    assert done.metrics["max_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert done.metrics["effective_samples"] == pytest.approx(1.0, abs=1e-4)
    assert done.metrics["tokens"] == 4 * 12
    assert done.metrics["grad_norm"] > 0
    assert done.metrics["skipped"] == 0


def test_every_token_weighs_the_same():
    long, short = sequence(1, turns=2), sequence(2, turns=1)
    (done,) = trainer().ask(Train(1, V1, (sample(1, 1.0, log=long), sample(2, -1.0, log=short))))
    assert done.metrics["loss"] == pytest.approx(-(12 - 6) / 18, abs=1e-4)


def test_training_makes_good_tokens_likelier_and_bad_ones_less_likely():
    driver = trainer()
    good, bad = sequence(1), sequence(2)
    before = action_logprob(driver.model, good), action_logprob(driver.model, bad)
    for step in range(1, 4):
        (done,) = driver.ask(Train(step, Version(0, step), (sample(1, 1.0, log=good), sample(2, -1.0, log=bad))))
        assert isinstance(done, Trained)
    assert action_logprob(driver.model, good) > before[0]
    assert action_logprob(driver.model, bad) < before[1]
    assert done.metrics["mismatch"] > 1e-3  # the policy has moved away from the one that sampled


def test_a_temperature_is_that_of_the_engine():
    model = tiny_model(0)
    log = TokenSequence()
    log.append_context(Segment.of([1, 2, 3]))
    tokens, logprobs = sample_chunk(model, log.whole().ids(), Sampling(8, temperature=0.5), 8)
    log.append_sampled(Generated(Segment.of(tokens), logprobs.tobytes(), (VersionRun(V1, tokens.size),)))
    (done,) = trainer(temperature=0.5).ask(Train(1, V1, (sample(1, 1.0, log=log),)))
    assert done.metrics["mismatch"] <= 1e-4
    (done,) = trainer().ask(Train(1, V1, (sample(1, 1.0, log=log),)))
    assert done.metrics["mismatch"] > 0.01


def test_masked_samples_add_nothing():
    with_masked, without = trainer(), trainer()
    (left,) = with_masked.ask(Train(1, V1, (*batch(), sample(9, 5.0, masked=True))))
    (right,) = without.ask(Train(1, V1, batch()))
    assert left == right
    assert same(weights(with_masked), weights(without))


def test_a_batch_without_tokens_to_train_moves_nothing():
    driver = trainer()
    driver.ask(Train(1, V1, batch()))  # so that the optimiser has momentum
    before = weights(driver)
    (done,) = driver.ask(Train(2, V2, (sample(9, 5.0, masked=True),)))
    assert (done.version, done.metrics["tokens"], done.metrics["grad_norm"]) == (V2, 0, 0)
    assert same(before, weights(driver))


@pytest.mark.parametrize("advantage", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_the_weights_alone(advantage):
    driver = trainer()
    before = weights(driver)
    bad = (sample(1, 1.0), sample(2, advantage))
    (failed,) = driver.ask(Train(1, V1, bad))
    assert isinstance(failed, TrainerFailed)
    assert failed.claim == 1
    assert "not finite" in failed.reason
    assert same(before, weights(driver))
    assert driver.ask(Train(1, V1, bad)) == [failed]
    (done,) = driver.ask(Train(2, V1, batch()))
    assert done.metrics["skipped"] == 1
    fresh = trainer()
    fresh.ask(Train(2, V1, batch()))
    assert same(weights(driver), weights(fresh))  # the skipped step left nothing in the optimiser either


def test_batches_that_cannot_be_trained_are_refused():
    driver = trainer()
    simulated, alien = TokenSequence(), TokenSequence()
    simulated.append_sampled(Generated(Segment(5), None, (VersionRun(V1, 5),)))
    alien.append_sampled(Generated(Segment.of([VOCABULARY]), bytes(4), (VersionRun(V1, 1),)))
    for claim, (log, reason) in enumerate(((simulated, "simulated"), (alien, "vocabulary"))):
        (failed,) = driver.ask(Train(claim, V1, (sample(1, 1.0, log=log),)))
        assert reason in failed.reason
    driver.ask(Train(8, V2, batch()))
    (failed,) = driver.ask(Train(9, V2, batch()))
    assert "not newer" in failed.reason


def test_training_is_deterministic():
    one, two, other = trainer(), trainer(), trainer(seed=5)
    torch.manual_seed(77)
    for driver in (one, two, other):
        driver.ask(Train(1, V1, batch()), Train(2, V2, batch(1)))
    assert same(weights(one), weights(two))
    assert not same(weights(one), weights(other))


def test_what_is_published_is_what_was_trained():
    store = MemoryStore()
    driver = trainer(store)
    _, published = driver.ask(Train(1, V1, batch()), Publish(V1))
    assert isinstance(published, Published)
    manifest = published.manifest
    assert max(manifest.bucket_bytes) <= SETTINGS["bucket_bytes"]
    out = unpack(manifest, [store.bucket(V1, index) for index in range(len(manifest.digests))])
    assert same(weights(driver), out)


def test_old_versions_are_dropped():
    store = MemoryStore()
    driver = trainer(store, keep_versions=2)
    driver.ask(Publish(V1), Publish(V2), Publish(V3))
    assert sorted(store._versions) == [V2, V3]
    (failed,) = driver.ask(Publish(V2))
    assert "not newer" in failed.reason


def test_a_grad_norm_is_clipped():
    # AdamW's first step does not depend on the gradient's scale, so the norm is looked at before it.
    driver = trainer(max_grad_norm=1e-3)
    seen = []

    def look(optimizer, *_):
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        seen.append(math.sqrt(sum(gradient.square().sum().item() for gradient in gradients)))

    driver.worker._optimizer.register_step_pre_hook(look)
    (done,) = driver.ask(Train(1, V1, batch()))
    assert done.metrics["grad_norm"] > 1e-3
    assert seen[0] == pytest.approx(1e-3, rel=1e-2)


def test_a_model_is_built_from_its_setting(tmp_path):
    one, two = tiny_model(3), tiny_model(3)
    assert same(one.state_dict(), two.state_dict())
    assert not same(one.state_dict(), tiny_model(4).state_dict())
    one.save_pretrained(tmp_path)
    assert same(one.state_dict(), build_model(str(tmp_path), dtype="float32", device="cpu").state_dict())
    assert build_model(TINY, dtype="bfloat16", device="cpu").dtype == torch.bfloat16
    for model, dtype, problem in (
        (str(tmp_path / "nothing"), "float32", "config.json"),
        ({"konfig": {}}, "float32", "keys"),
        ({"config": {"model_type": "gwen"}}, "float32", "gwen"),
        (TINY, "float33", "dtype"),
    ):
        with pytest.raises(RequestError, match=problem):
            build_model(model, dtype=dtype, device="cpu")


def test_logprobs_of_a_greedy_token_are_those_of_temperature_one():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    tokens = torch.tensor([2])
    assert torch.equal(token_logprobs(logits, tokens, 0.0), token_logprobs(logits, tokens, 1.0))
    np.testing.assert_allclose(
        token_logprobs(logits, tokens, 0.5).item(), 6 - math.log(sum(math.exp(x) for x in (2, 4, 6))), rtol=1e-6
    )
