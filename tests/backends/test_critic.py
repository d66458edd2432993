"""The critic: advantages written out, gradients checked by differences, part of checkpoints and of nothing else."""

import math

import numpy as np
import pytest
import torch
from packed_parts import conversation
from parts import TINY, V1, VOCABULARY, Driver, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollart.algo.loss import policy_loss
from rollart.algo.packed import PackedBatch
from rollart.backends.models import token_logprobs
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.config.algorithm import CriticSettings, LossSettings
from rollart.types.errors import RequestError
from rollart.types.messages import Publish, Save, Saved, Train
from rollart.types.trajectory import TrainSample, Turn
from rollart.types.versions import Version

SETTINGS = {"model": TINY, "learning_rate": 1e-3, "max_grad_norm": 1e9}
CRITIC = {"discount": 0.9, "trace": 0.8, "value_weight": 0.5, "value_learning_rate": 1e-2, "whiten": False}


def batch(seed=0):
    """One sequence; two, with an empty turn; one cut off behind an observation; one in a new context."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCABULARY, 6)
    shapes = [
        ([[(4, 3), (2, 0)]], [0.5, 1.0], False),
        ([[(3, 2), (0, 1)], [(2, 0)]], [0.0, 0.25, -1.0], False),
        ([[(5, 4)]], [0.125], True),
        ([[(2, 1)], []], [2.0], True),
    ]
    out = []
    for number, (sequences, rewards, truncated) in enumerate(shapes):
        logs = tuple(conversation(rng, prompt if k == 0 else [7, 8, 9], turns) for k, turns in enumerate(sequences))
        tokens = [sampled for turns in sequences for sampled, _ in turns]
        # Advantages of samples are not looked at: these would be noticed.
        turns = tuple(Turn(count, 1e6, reward) for count, reward in zip(tokens, rewards, strict=True))
        out.append(TrainSample(number, 0, "t", logs, turns, sum(rewards), False, truncated))
    out.append(TrainSample(9, 0, "t", (conversation(rng, prompt, [(3, 0)]),), (Turn(3, 0.0, 50.0),), 50.0, True, True))
    return tuple(out)


REWARDS = {0: [0, 0, 0, 0.5, 0, 1.0], 1: [0, 0, 0.25, 0, -1.0], 2: [0, 0, 0, 0, 0.125], 3: [0, 2.0]}
"""Rewards by token: each at the last token of its turn; that of a turn without tokens goes to the turn before."""


def trainer(store=None, critic=CRITIC, **settings):
    driver = Driver(TorchTrainer, {**SETTINGS, "store": store or MemoryStore(), "critic": critic, **settings})
    driver.model = driver.worker._model
    driver.head = driver.worker._critic._head
    return driver


def train(driver, step=1, samples=None):
    (done,) = driver.call(Train(step, Version(0, step), batch() if samples is None else samples))
    return done


def pretend(driver, seed=3):
    """A head that expects something, as if it had learnt."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        driver.head.weight.normal_(0, 0.3)
        driver.head.bias.fill_(0.2)


def hidden_states(model, log):
    tokens = torch.from_numpy(log.whole().ids().astype(np.int64))
    out = model(tokens[None], use_cache=False, output_hidden_states=True)
    return tokens, out.logits[0], out.hidden_states[-1][0]


def by_hand(head, samples, model, settings):
    """Loss of policy and values, one sequence at a time, with advantages from the definition of GAE."""
    parts = {"logprobs": [], "behaviour": [], "advantages": [], "values": [], "returns": []}
    sequences = []
    for sample in samples:
        if sample.masked:
            continue
        values = []
        for log in sample.sequences:
            tokens, logits, hidden = hidden_states(model, log)
            acted = torch.from_numpy(np.flatnonzero(log.action_mask()))
            if acted.numel():
                parts["logprobs"].append(token_logprobs(logits[acted - 1], tokens[acted], 1.0))
                parts["behaviour"].append(torch.from_numpy(log.logprobs()[log.action_mask()]))
                sequences.append(acted.numel())
                values.append(head(hidden[acted - 1]).squeeze(-1))
        last = head(hidden[-1]).item() if sample.truncated else 0.0
        expected = torch.cat(values)
        v = [*expected.detach().tolist(), last]
        rewards = REWARDS[sample.trajectory]
        deltas = [rewards[t] + settings.discount * v[t + 1] - v[t] for t in range(len(rewards))]
        decay = settings.discount * settings.trace
        gaes = [sum(decay ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]
        parts["advantages"].append(torch.tensor(gaes))
        parts["returns"].append(torch.tensor(gaes) + expected.detach())
        parts["values"].append(expected)
    joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
    if settings.whiten:
        joined["advantages"] = (joined["advantages"] - joined["advantages"].mean()) / joined["advantages"].std()
    total = joined["logprobs"].numel()
    policy, _ = policy_loss(
        LossSettings(),
        PackedBatch(
            logprobs=joined["logprobs"],
            behaviour=joined["behaviour"],
            advantages=joined["advantages"],
            sequence=torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor(sequences)),
            sequences=len(sequences),
            total_tokens=total,
            total_sequences=len(sequences),
        ),
    )
    return policy + settings.value_weight * 0.5 * (joined["values"] - joined["returns"]).square().sum() / total


def gradients(driver):
    kept = {}

    def look(*_):
        kept.update({name: each.grad.clone() for name, each in driver.model.named_parameters()})
        kept.update({f"head.{name}": each.grad.clone() for name, each in driver.head.named_parameters()})

    driver.worker._optimizer.register_step_pre_hook(look)
    return kept


@pytest.mark.parametrize("options", [{}, {"token_budget": 30}, {"gradient_checkpointing": True}])
@pytest.mark.parametrize("whiten", [False, True])
def test_loss_and_gradient_are_those_of_the_definition(whiten, options):
    settings = CRITIC | {"whiten": whiten}
    driver = trainer(critic=settings, **options)
    pretend(driver)
    head, model = torch.nn.Linear(32, 1), tiny_model()
    head.load_state_dict(driver.head.state_dict())
    found = gradients(driver)
    done = train(driver)
    loss = by_hand(head, batch(), model, CriticSettings.model_validate(settings))
    loss.backward()
    assert done.metrics["loss"] == pytest.approx(loss.item(), rel=1e-3)
    expected = {name: each.grad for name, each in model.named_parameters()}
    expected |= {f"head.{name}": each.grad for name, each in head.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-3, atol=2e-4 * gradient.abs().max().item())


def test_the_gradient_of_the_head_is_that_of_the_value_loss_by_differences():
    """Values move, their returns do not: what they are made of was fixed before the update."""
    driver = trainer()
    pretend(driver)
    found = gradients(driver)
    start = driver.head.state_dict()["weight"].clone()
    model = tiny_model()
    seen, returns = [], []
    with torch.no_grad():
        for sample in batch():
            if sample.masked:
                continue
            hiddens = []
            for log in sample.sequences:
                _, _, hidden = hidden_states(model, log)
                acted = torch.from_numpy(np.flatnonzero(log.action_mask()))
                hiddens.append(hidden[acted - 1])
            last = driver.head(hidden[-1]).item() if sample.truncated else 0.0
            states = torch.cat(hiddens)
            v = [*driver.head(states).squeeze(-1).tolist(), last]
            rewards, value = REWARDS[sample.trajectory], 0.0
            targets = []
            for t in reversed(range(len(rewards))):
                value = rewards[t] + 0.9 * v[t + 1] - v[t] + 0.72 * value
                targets.insert(0, value + v[t])
            seen.append(states.double())
            returns += targets
    states, targets = torch.cat(seen), torch.tensor(returns, dtype=torch.float64)

    def value_loss(weight):
        return 0.5 * 0.5 * (states @ weight.double()[0] + 0.2 - targets).square().mean()

    train(driver)
    for place in range(0, 32, 5):
        step = torch.zeros_like(start)
        step[0, place] = 1e-3
        difference = (value_loss(start + step) - value_loss(start - step)) / 2e-3
        assert found["head.weight"][0, place].item() == pytest.approx(difference.item(), rel=1e-3, abs=1e-4)


def test_it_starts_without_expectations_and_learns():
    driver = trainer(critic=CRITIC | {"value_learning_rate": 3e-2}, learning_rate=1e-9)
    first = train(driver, 1)
    assert first.metrics["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    for step in range(2, 40):
        done = train(driver, step)
    assert done.metrics["value_error"] < 0.4 * first.metrics["value_error"]
    assert done.metrics["explained_variance"] > 0.7


def test_it_follows_the_schedule_of_the_policy():
    """In the first step AdamW moves every weight by its learning rate."""
    driver = trainer(schedule={"warmup_steps": 3})
    train(driver)
    assert driver.head.weight.abs().max().item() == pytest.approx(0.25 * 1e-2, rel=1e-3)


def test_a_step_that_is_not_finite_leaves_it_alone():
    driver = trainer()
    train(driver, 1)
    before = {name: tensor.clone() for name, tensor in driver.head.state_dict().items()}
    with torch.no_grad():
        driver.model.model.norm.weight[0] = math.nan
    done = train(driver, 2)
    assert done.metrics["skipped_now"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in driver.head.state_dict().items())


def test_a_checkpoint_holds_it_and_a_version_does_not(tmp_path):
    store = MemoryStore()
    driver = trainer(store, checkpoints=str(tmp_path))
    train(driver, 1)
    (published,) = driver.call(Publish(V1))
    assert {entry.name for entry in published.manifest.tensors} == tiny_model().state_dict().keys()
    assert driver.call(Save(V1)) == [Saved(V1)]
    (folder,) = tmp_path.iterdir()
    saved = load_file(folder / "critic.safetensors")
    assert torch.equal(saved["weight"], driver.head.weight)
    assert {"optimizer/weight/exp_avg", "optimizer/bias/exp_avg_sq", "optimizer/weight/step"} < saved.keys()
    AutoModelForCausalLM.from_pretrained(folder)
    again = trainer(checkpoints=str(tmp_path))
    assert torch.equal(again.head.weight, driver.head.weight)
    assert train(again, 2, batch(1)) == train(driver, 2, batch(1))
    assert torch.equal(again.head.weight, driver.head.weight)


def test_a_checkpoint_without_a_critic_is_refused_and_named(tmp_path):
    plain = Driver(TorchTrainer, {**SETTINGS, "store": MemoryStore(), "checkpoints": str(tmp_path)})
    plain.call(Train(1, V1, batch()), Save(V1))
    with pytest.raises(RequestError, match=r"has no critic\.safetensors"):
        trainer(checkpoints=str(tmp_path))


def test_a_batch_in_which_nothing_is_trained_moves_nothing():
    driver = trainer()
    done = train(driver, 1, (batch()[-1],))
    assert (done.metrics["tokens"], done.metrics["updates"]) == (0, 0)
    assert not driver.head.weight.any()
