"""The torch trainer: its step is that of the reference trainer, whatever is packed, cut, shared or overlapped."""

import logging
import math
import threading

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from packed_parts import samples
from parts import PATIENCE_S, TINY, V1, V2, V3, Driver, tiny_model

from rollart.backends.models import build_model
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.tensors import unpack
from rollart.backends.trainers.packed_model import PackedModel
from rollart.backends.trainers.reference import ReferenceTrainer
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.config.training import Schedule
from rollart.types.messages import Publish, Published, Save, Saved, Train, Trained, TrainerFailed
from rollart.types.trajectory import TrainSample, Turn
from rollart.types.versions import Version

SETTINGS = {"model": TINY, "learning_rate": 1e-3, "bucket_bytes": 16384, "max_grad_norm": 1e9}


def trainer(store=None, kind=TorchTrainer, **settings):
    driver = Driver(kind, {**SETTINGS, "store": store or MemoryStore(), **settings})
    driver.model = driver.worker._model
    return driver


def train(driver, step=1, batch=None):
    (done,) = driver.call(Train(step, Version(0, step), samples(step) if batch is None else batch))
    return done


def weights(driver):
    return {name: tensor.clone() for name, tensor in driver.model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def gradients(driver):
    """Those of the next step, kept from before the optimiser."""
    kept = {}

    def look(*_):
        kept.update({name: each.grad.clone() for name, each in driver.model.named_parameters()})

    driver.worker._optimizer.register_step_pre_hook(look)
    return kept


def levelled(batch, keep=0):
    """Without advantages, but for the first `keep` samples."""
    return tuple(
        sample if number < keep else replace(sample, turns=tuple(replace(turn, advantage=0.0) for turn in sample.turns))
        for number, sample in enumerate(batch)
    )


def poisoned(value=math.nan):
    good = samples()
    first = good[0]
    turns = (first.turns[0], Turn(first.turns[1].tokens, value))  # one of its turns is enough
    return (TrainSample(first.trajectory, first.group, first.task, first.sequences, turns, 0.0), *good[1:])


@pytest.mark.parametrize("options", [{}, {"token_budget": 40}, {"token_budget": 1}, {"gradient_checkpointing": True}])
def test_a_step_is_that_of_the_reference_trainer(options):
    left, right = trainer(kind=ReferenceTrainer), trainer(**options)
    expected, found = gradients(left), gradients(right)
    slow, fast = train(left), train(right)
    for name in ("loss", "grad_norm", "ratio_mean", "mismatch", "tokens", "effective_samples", "clipped_high"):
        assert fast.metrics[name] == pytest.approx(slow.metrics[name], rel=1e-4, abs=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item())
    for name, tensor in weights(left).items():
        torch.testing.assert_close(weights(right)[name], tensor, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("keep", "loss"), [(3, {}), (0, {}), (3, {"kl_weight": 0.1})])
def test_who_has_no_advantage_is_measured_only(keep, loss, monkeypatch):
    left, right = trainer(kind=ReferenceTrainer), trainer(loss=loss)
    going_back = []
    scores = PackedModel.scores

    def look(self, batch, **options):
        going_back.append((torch.is_grad_enabled(), {item.trajectory for item in batch.items}))
        return scores(self, batch, **options)

    train(left), train(right)  # so that there is momentum, which moves weights without any gradient
    monkeypatch.setattr(PackedModel, "scores", look)
    batch = levelled(samples(2), keep)
    found, expected = train(right, 2, batch), train(left, 2, batch)
    learners = {sample.trajectory for sample in batch[:keep] if not sample.masked}
    everybody = {sample.trajectory for sample in batch if not sample.masked}
    if loss or not keep:
        assert (True, everybody) in going_back
    else:
        assert going_back == [(False, everybody - learners), (True, learners)]
    assert found.metrics["sequences"] == len(everybody)
    if not loss:
        for name in ("loss", "grad_norm", "ratio_mean", "mismatch", "tokens"):
            assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4, abs=1e-6), name
        for name, tensor in weights(left).items():
            torch.testing.assert_close(weights(right)[name], tensor, rtol=0, atol=4e-4)


def test_prompts_are_fed_once():
    done = train(trainer())
    assert done.metrics["micro_batches"] == 1
    assert done.metrics["fed_tokens"] < sum(each.sequences[0].length for each in samples(1) if not each.masked) - 60


@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "gspo", "clip_low": 0.2, "clip_high": 0.2},
        {"kind": "cispo", "kl_weight": 0.1, "entropy_weight": 0.01},
        {"correction": {"kind": "truncate"}},
        {"correction": {"kind": "mask", "level": "geometric", "cap": 1.2}},
    ],
)
def test_every_loss_is_the_same_however_the_batch_is_cut(loss):
    whole, cut = trainer(loss=loss), trainer(loss=loss, token_budget=40)
    expected, found = gradients(whole), gradients(cut)
    one, many = train(whole), train(cut)
    assert many.metrics["micro_batches"] > 1
    assert many.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-4, abs=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=2e-5 * gradient.abs().max().item())


def test_a_correction_sees_the_weights_before_the_update():
    driver = trainer(loss={"correction": {"kind": "truncate"}})
    done = train(driver)
    assert done.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert 0 < done.metrics["correction_weight"] != 1.0
    assert done.metrics["mismatch"] > 0.1  # these tokens were not sampled from this model


def test_a_kl_penalty_holds_to_the_weights_of_the_start(tmp_path):
    loss = {"kl_weight": 0.5}
    first = trainer(loss=loss, checkpoints=str(tmp_path))
    assert train(first, 1).metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    moved = train(first, 2)
    assert moved.metrics["kl"] > 1e-4
    first.call(Save(V2))
    third = train(first, 3)
    later = trainer(loss=loss, checkpoints=str(tmp_path))
    assert train(later, 3) == third


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_skipped_and_named(value, caplog):
    store = MemoryStore()
    driver, fresh = trainer(store), trainer()
    train(driver, 1)
    before = weights(driver)
    with caplog.at_level(logging.WARNING):
        done = train(driver, 2, poisoned(value))
    assert isinstance(done, Trained)
    assert done.version == V2
    assert done.metrics["skipped"] == done.metrics["skipped_now"] == 1
    assert all(math.isfinite(number) for number in done.metrics.values())
    assert "claim 2 to v0.2" in caplog.text
    assert "trajectory 0 has advantage" in caplog.text
    assert same(before, weights(driver))
    (published,) = driver.call(Publish(V2))  # under the new name, the weights of before
    assert isinstance(published, Published)
    after = train(driver, 3)
    assert (after.metrics["skipped"], after.metrics["skipped_now"]) == (1, 0)
    train(fresh, 1)
    train(fresh, 3)
    assert same(weights(driver), weights(fresh))  # the skipped step left nothing in the optimiser either


def test_too_many_skipped_in_a_row_stop_the_run():
    driver = trainer(max_skipped=2)
    for step in (1, 3):  # one good step between them: not in a row
        assert train(driver, step, poisoned()).metrics["skipped_now"] == 1
        assert train(driver, step + 1).metrics["skipped_now"] == 0
    before = weights(driver)
    assert isinstance(train(driver, 5, poisoned()), Trained)
    failed = train(driver, 6, poisoned())
    assert isinstance(failed, TrainerFailed)
    assert failed.claim == 6
    assert "trajectory 0 has advantage nan" in failed.reason
    assert "2 claims in a row" in failed.reason
    assert "4 steps so far" in failed.reason
    assert same(before, weights(driver))


def test_skips_in_a_row_are_counted_over_a_restart(tmp_path):
    driver = trainer(max_skipped=2, checkpoints=str(tmp_path))
    train(driver, 1, poisoned())
    assert driver.call(Save(V1)) == [Saved(V1)]
    later = trainer(max_skipped=2, checkpoints=str(tmp_path))
    assert isinstance(train(later, 2, poisoned()), TrainerFailed)


def test_broken_weights_and_log_probabilities_are_named():
    driver = trainer(max_skipped=1)
    with torch.no_grad():
        driver.model.model.norm.weight[0] = math.nan
    assert "model.norm.weight are not finite" in train(driver, 1).reason
    log = samples()[0].sequences[0]
    log._logprobs[:4] = np.array([-math.inf], dtype="<f4").tobytes()
    batch = (TrainSample(4, 0, "t", (log,), (Turn(log.sampled, 1.0),), 0.0),)
    assert "trajectory 4 has non-finite log-probabilities" in train(trainer(max_skipped=1), 1, batch).reason


class Slow(MemoryStore):
    """Publishes when it is let."""

    def __init__(self):
        super().__init__()
        self.entered, self.open = threading.Event(), threading.Event()

    def publish(self, manifest, buckets):
        self.entered.set()
        assert self.open.wait(PATIENCE_S)
        super().publish(manifest, buckets)


def test_a_step_is_trained_while_the_version_before_is_published(tmp_path):
    store = Slow()
    driver = trainer(store, checkpoints=str(tmp_path))
    at_start = weights(driver)
    driver.send(Publish(Version(0, 0)), Train(1, V1, samples(1)), Save(V1), Publish(V1))
    while driver.slice() is not None:
        pass
    assert store.entered.wait(PATIENCE_S)
    assert not driver.events  # events stay in order …
    assert driver.worker._version == V1  # … but the step is done
    assert not same(at_start, weights(driver))
    assert store.newest() is None
    store.open.set()
    published, trained, saved, second = driver.answers(4)
    assert (published.manifest.version, trained.version, saved) == (Version(0, 0), V1, Saved(V1))
    buckets = [store.bucket(Version(0, 0), index) for index in range(len(published.manifest.digests))]
    assert same(at_start, unpack(published.manifest, buckets))  # not what was trained meanwhile
    assert second.manifest.parent == Version(0, 0)
    driver.worker.close()


def test_a_store_that_breaks_is_the_end_of_the_trainer():
    class Broken(MemoryStore):
        def publish(self, *_):
            raise OSError("no network")

    driver = trainer(Broken())
    with pytest.raises(OSError, match="no network"):
        driver.call(Publish(V1))


def test_tied_weights_are_published_once_and_old_versions_are_dropped():
    store = MemoryStore()
    driver = trainer(store, keep_versions=2)
    for version in (V1, V2, V3):
        (published,) = driver.call(Publish(version))
    assert sorted(store._versions) == [V2, V3]
    places = {entry.name: (entry.bucket, entry.offset) for entry in published.manifest.tensors}
    assert places["lm_head.weight"] == places["model.embed_tokens.weight"]


def test_bfloat16_trains_master_weights_and_publishes_converted_ones():
    store = MemoryStore()
    driver = trainer(store, dtype="bfloat16", learning_rate=1e-6)
    before = weights(driver)
    assert before["model.norm.weight"].dtype == torch.float32
    train(driver)
    assert not same(before, weights(driver))  # such small steps would be lost in bfloat16
    (published,) = driver.call(Publish(V1))
    manifest = published.manifest
    assert {entry.dtype for entry in manifest.tensors} == {"bfloat16"}
    out = unpack(manifest, [store.bucket(V1, index) for index in range(len(manifest.digests))])
    assert same(out, {name: tensor.bfloat16() for name, tensor in weights(driver).items()})


def test_the_learning_rate_follows_its_schedule():
    driver = trainer(schedule={"kind": "cosine", "warmup_steps": 1, "total_steps": 3})
    rates = [train(driver, step, poisoned() if step == 2 else None).metrics["learning_rate"] for step in range(1, 6)]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.5e-3, 0.0])  # the skipped second step did not count
    for wrong in ({"kind": "cosine"}, {"total_steps": 3}, {"kind": "cosine", "warmup_steps": 3, "total_steps": 3}):
        with pytest.raises(ValueError, match="total_steps"):
            Schedule.model_validate(wrong)


def test_a_batch_without_tokens_to_train_moves_nothing():
    driver = trainer(schedule={"warmup_steps": 5})
    train(driver, 1)
    before = weights(driver)
    done = train(driver, 2, (samples()[-1],))
    assert (done.version, done.metrics["tokens"], done.metrics["grad_norm"]) == (V2, 0, 0)
    assert same(before, weights(driver))


def test_a_model_of_a_folder_is_trained_and_published_under_its_names(tmp_path):
    tiny_model(4).save_pretrained(tmp_path)
    driver = trainer(model=str(tmp_path))
    assert isinstance(train(driver), Trained)
    assert weights(driver).keys() == build_model(TINY, dtype="float32", device="cpu").state_dict().keys()
