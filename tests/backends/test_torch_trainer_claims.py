"""A claim in several optimiser steps: against a loop written out, and through skips, schedules and restarts."""

import logging
import math

import numpy as np
import pytest
import torch
from packed_parts import samples
from parts import TINY, V1, V2, Driver, tiny_model

from rollart.algo.loss import policy_loss
from rollart.algo.packed import PackedBatch
from rollart.backends.models import token_logprobs
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.config.algorithm import LossSettings
from rollart.types.messages import Save, Saved, Train, TrainerFailed
from rollart.types.trajectory import TrainSample, Turn
from rollart.types.versions import Version

SETTINGS = {"model": TINY, "learning_rate": 1e-3, "bucket_bytes": 16384, "max_grad_norm": 1e9}
DECOUPLED = {"correction": {"kind": "truncate", "cap": 5.0}}


def trainer(**settings):
    driver = Driver(TorchTrainer, {**SETTINGS, "store": MemoryStore(), **settings})
    driver.model = driver.worker._model
    return driver


def train(driver, step=1, batch=None):
    (done,) = driver.call(Train(step, Version(0, step), samples(step) if batch is None else batch))
    return done


def weights(driver):
    return {name: tensor.clone() for name, tensor in driver.model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def poisoned(*trajectories):
    """These have a turn whose advantage is no number."""
    return tuple(
        TrainSample(
            each.trajectory,
            each.group,
            each.task,
            each.sequences,
            tuple(Turn(turn.tokens, math.nan) for turn in each.turns),
            0.0,
            each.masked,
        )
        if each.trajectory in trajectories
        else each
        for each in samples(1)
    )


# --- the steps ------------------------------------------------------------------------------------------------------


def by_hand(loss, epochs, minibatches):
    """The same claim, one sequence at a time, with a plain model and AdamW."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=SETTINGS["learning_rate"], weight_decay=0.0)
    logs = [each for each in samples(1) if not each.masked]

    def scored(sample):
        tokens = torch.from_numpy(sample.sequences[0].whole().ids().astype(np.int64))
        mask = torch.from_numpy(sample.sequences[0].action_mask()[1:])
        return token_logprobs(model(tokens[None, :-1], use_cache=False).logits[0], tokens[1:], 1.0)[mask]

    with torch.no_grad():
        proximal = {sample.trajectory: scored(sample) for sample in logs}
    for _ in range(epochs):
        for first in range(minibatches):
            part = logs[first::minibatches]
            logprobs = [scored(sample) for sample in part]
            batch = PackedBatch(
                logprobs=torch.cat(logprobs),
                behaviour=torch.cat(
                    [torch.from_numpy(s.sequences[0].logprobs()[s.sequences[0].action_mask()]) for s in part]
                ),
                advantages=torch.cat([torch.full((t.tokens,), t.advantage) for s in part for t in s.turns]),
                sequence=torch.repeat_interleave(torch.arange(len(part)), torch.tensor([len(p) for p in logprobs])),
                sequences=len(part),
                total_tokens=sum(len(p) for p in logprobs),
                total_sequences=len(part),
                proximal=torch.cat([proximal[s.trajectory] for s in part])
                if loss.correction.kind.value != "none"
                else None,
            )
            optimizer.zero_grad()
            policy_loss(loss, batch)[0].backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("loss", [{}, DECOUPLED, {"kind": "gspo", "clip_low": 0.2, "clip_high": 0.2, **DECOUPLED}])
@pytest.mark.parametrize(("epochs", "minibatches"), [(2, 1), (1, 3), (2, 3)])
def test_several_steps_are_those_of_a_loop_written_out(loss, epochs, minibatches):
    driver = trainer(loss=loss, epochs=epochs, minibatches=minibatches, token_budget=60)
    done = train(driver)
    assert done.metrics["updates"] == epochs * minibatches
    expected, start = by_hand(LossSettings.model_validate(loss), epochs, minibatches), tiny_model().state_dict()
    for name, tensor in weights(driver).items():
        # AdamW's first steps have the size of the learning rate, whatever the gradient: its sign may turn on rounding.
        wrong = (tensor - expected[name]).abs() > 2e-4
        assert wrong.float().mean() < 0.01
        assert not torch.equal(tensor, start[name])


def test_the_mismatch_is_that_of_the_weights_before_the_claim():
    once, often = trainer(), trainer(epochs=3, minibatches=2)
    one, many = train(once), train(often)
    for name in ("mismatch", "mismatch_kl", "mismatch_ratio", "effective_samples", "max_ratio", "tokens", "sequences"):
        assert many.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4)
    assert "updates" in one.metrics
    assert many.metrics["ratio_mean"] != pytest.approx(one.metrics["ratio_mean"], rel=1e-4)  # this one moves


def test_the_proximal_policy_stays_while_the_weights_move():
    fresh, moved = (train(trainer(loss=DECOUPLED, epochs=epochs)) for epochs in (1, 4))
    assert fresh.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert abs(moved.metrics["ratio_mean"] - 1.0) > 1e-3
    assert moved.metrics["correction_weight"] == pytest.approx(fresh.metrics["correction_weight"], rel=1e-4)


# --- skips, schedules, restarts -------------------------------------------------------------------------------------


def test_only_the_mini_batch_that_is_not_finite_is_skipped(caplog):
    driver = trainer(epochs=2, minibatches=4)
    before = weights(driver)
    with caplog.at_level(logging.WARNING):
        done = train(driver, 1, poisoned(5))
    assert (done.metrics["updates"], done.metrics["skipped_now"], done.metrics["skipped"]) == (6, 2, 2)
    assert "trajectory 5 has advantage nan" in caplog.text
    assert all(math.isfinite(number) for number in done.metrics.values())
    assert not same(before, weights(driver))
    assert all(tensor.isfinite().all() for tensor in weights(driver).values())


def test_a_claim_without_a_single_step_leaves_the_weights_and_may_end_the_run():
    driver = trainer(minibatches=2, max_skipped=2)
    before = weights(driver)
    done = train(driver, 1, poisoned(*range(8)))
    assert (done.metrics["updates"], done.metrics["skipped_now"]) == (0, 2)
    failed = train(driver, 2, poisoned(*range(8)))
    assert isinstance(failed, TrainerFailed)
    assert "2 claims in a row and 4 steps" in failed.reason
    assert same(before, weights(driver))


def test_a_claim_with_a_step_never_fails():
    """What fails leaves the weights as they were, and these have moved."""
    driver = trainer(minibatches=2, max_skipped=1)
    done = train(driver, 1, poisoned(1))
    assert (done.metrics["updates"], done.metrics["skipped_now"]) == (1, 1)


def test_schedules_count_claims():
    driver = trainer(minibatches=3, epochs=2, schedule={"warmup_steps": 3})
    claims = [None, poisoned(*range(8)), poisoned(3), None]
    rates = [train(driver, step, batch).metrics["learning_rate"] for step, batch in enumerate(claims, 1)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.5e-3, 0.75e-3])  # the second was skipped as a whole


@pytest.mark.parametrize("critic", [None, {"value_learning_rate": 1e-2}])
def test_training_goes_on_bit_by_bit_after_a_restart(critic, tmp_path):
    options = {"epochs": 2, "minibatches": 3, "loss": DECOUPLED, "critic": critic, "checkpoints": str(tmp_path)}
    driver = trainer(**options)
    train(driver, 1)
    assert driver.call(Save(V1)) == [Saved(V1)]
    expected = train(driver, 2)
    again = trainer(**options)
    assert again.worker.info().restored == V1
    assert train(again, 2) == expected
    assert same(weights(again), weights(driver))
    assert again.call(Save(V2)) == [Saved(V2)]
