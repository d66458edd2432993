"""Every algorithm reaches the known optimum of small worlds, also with stale data if it is corrected for."""

import numpy as np
import pytest
import torch
from tabular import BANDIT, CREDIT, STAIRS, TRAP, rollout, train

from rollart.config.algorithm import CorrectionSettings, LossSettings

WORLDS = {"bandit": BANDIT, "stairs": STAIRS}
KINDS = ("ppo", "gspo", "cispo")
SOLVED = 0.95
"""The optimum of every world is 1."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loss(kind, correction="none", **settings):
    return LossSettings(kind=kind, correction=CorrectionSettings(kind=correction, cap=5.0), **settings)


@pytest.mark.parametrize("world", [*WORLDS.values(), TRAP], ids=[*WORLDS, "trap"])
def test_the_optimum_is_one_and_far_from_where_training_starts(world):
    best = np.zeros_like(world.start)
    best[:, np.argmax(world.reward[-1])] = 50.0
    assert world.worth(best) == pytest.approx(1.0)
    assert world.worth(world.start) < 0.6


def test_what_a_policy_is_worth_is_what_it_earns():
    for world in (*WORLDS.values(), TRAP):
        rollouts = rollout(world, [world.start], 0, groups=50, members=400, rng=np.random.default_rng(1))
        assert rollouts.rewards.sum(1).mean() == pytest.approx(world.worth(world.start), abs=0.02)


def test_a_trajectory_spans_several_versions_and_remembers_which():
    rng = np.random.default_rng(1)
    versions = [rng.normal(size=STAIRS.start.shape) for _ in range(4)]
    rollouts = rollout(STAIRS, versions, 1, groups=1, members=200, rng=rng)
    assert {int(version) for version in rollouts.versions[rollouts.acted]} == {1, 2, 3}
    spans = [len(set(turns)) for turns in rollouts.turns(rollouts.versions)]
    assert spans.count(2) > 20
    assert spans.count(3) > 20
    for states, actions, used, behaviour in zip(
        *(rollouts.turns(t) for t in (rollouts.states, rollouts.actions, rollouts.versions, rollouts.behaviour)),
        strict=True,
    ):
        for state, action, version, logprob in zip(states, actions, used, behaviour, strict=True):
            row = versions[version][state]
            assert logprob == pytest.approx(row[action] - np.log(np.exp(row).sum()))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("credit", CREDIT)
def test_every_advantage_reaches_the_optimum(credit, world):
    assert train(WORLDS[world], loss("ppo"), credit, updates=40, rate=5.0) > SOLVED


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(loss("ppo", clip_low=0.2, clip_high=0.28), id="clip-higher"),
        pytest.param(loss("gspo"), id="gspo"),
        pytest.param(loss("cispo"), id="cispo"),
    ],
)
def test_every_loss_reaches_the_optimum_with_several_epochs_per_batch(settings, world):
    assert train(WORLDS[world], settings, updates=30, epochs=2, rate=5.0) > SOLVED


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_with_stale_data_and_a_correction_it_is_still_reached(kind, staleness):
    for seed, correction in enumerate(("truncate", "mask")):
        settings = loss(kind, correction)
        assert train(STAIRS, settings, updates=30, epochs=2, rate=5.0, staleness=staleness, seed=seed) > SOLVED


@pytest.mark.parametrize("kind", KINDS)
def test_very_stale_data_ruin_a_policy_unless_they_are_corrected_for(kind):
    """Data that are ten updates old: uncorrected, the policy is stuck at 0.7 for good; corrected, it gets all of 1."""

    def trapped(correction, staleness, seed):
        return train(TRAP, loss(kind, correction), updates=60, rate=6.0, members=32, staleness=staleness, seed=seed)

    for seed in range(2):
        assert trapped("none", 0, seed) > SOLVED  # the world is no trap for fresh data
        assert trapped("none", 10, seed) < 0.75
        assert trapped("truncate", 10, seed) > SOLVED
        assert trapped("mask", 10, seed) > SOLVED
