"""The torch trainer itself reaches the known optimum of small worlds: what it is sent is what the controller sends."""

import math

import numpy as np
import own_algorithms
import pytest
import torch
from parts import Driver

from rollart.backends.models import build_model
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.config.algorithm import AlgorithmSettings
from rollart.control.credit import keeps_states, samples
from rollart.ports.algorithm import advantage_of
from rollart.types.messages import Train, Trained, TrainerFailed
from rollart.types.tokens import LOGPROB, Generated, Segment, VersionRun
from rollart.types.trajectory import Prompt, Purpose, Trajectory
from rollart.types.versions import Version

MODEL = {
    "config": {
        "model_type": "qwen3",
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
}
ARMS = np.array([0.2, 0.6, 0.0, 1.0])
"""What the first four tokens pay as an action; any other pays nothing."""
STAIRS = {0: (1, 0.0), 1: (-1, 0.4), 2: (0, 0.0)}
"""The moves of tokens, in turn: up, off with 0.4, or stay. Three steps up pay 1; five turns are all there are."""
GROUPS, MEMBERS = 4, 16


class World:
    """Groups of episodes, sampled from the weights of some updates ago, as trajectories of the controller."""

    def __init__(self, algorithm, *, staleness=0, turns=1, seed=0, **settings):
        self.algorithm = AlgorithmSettings.model_validate(algorithm)
        own = self.algorithm
        self.driver = Driver(
            TorchTrainer,
            {
                "model": MODEL,
                "store": MemoryStore(),
                "seed": 5,
                "loss": own.loss,
                "epochs": own.epochs,
                "minibatches": own.minibatches,
                "critic": own.critic(),
                **settings,
            },
        )
        self.staleness, self.turns = staleness, turns
        self.rng = np.random.default_rng(seed)
        self.engine = build_model(MODEL, dtype="float32", device="cpu")
        self.versions = []

    def train(self, updates):
        """The mean reward of what the last weights sample."""
        for update in range(updates):
            self._keep()
            batch = samples(advantage_of(self.algorithm), self.rollout(self.versions[-1 - min(update, self.staleness)]))
            (done,) = self.driver.call(Train(update, Version(0, update + 1), tuple(batch)))
            assert isinstance(done, Trained), done
        self._keep()
        return np.mean([member.reward for group in self.rollout(self.versions[-1]) for member in group])

    def _keep(self):
        state = self.driver.worker._model.state_dict()
        self.versions.append({name: tensor.clone() for name, tensor in state.items()})

    def rollout(self, weights):
        self.engine.load_state_dict(weights)
        groups = [[self._started(group, member) for member in range(MEMBERS)] for group in range(GROUPS)]
        everybody = [member for group in groups for member in group]
        place = dict.fromkeys((each.id for each in everybody), 0)
        for _ in range(self.turns):
            running = [each for each in everybody if each.reward is None]
            for length in {
                each.sequence.length for each in running
            }:  # all have the same, as observations are one token
                self._turn([each for each in running if each.sequence.length == length], place)
        for each in everybody:
            if each.reward is None:
                each.reward, each.truncated = sum(each.turn_rewards), True
        return groups

    def _started(self, group, member):
        prompt = Prompt("p", "t", group)
        each = Trajectory(
            id=group * MEMBERS + member,
            group=group,
            member=member,
            attempt=0,
            task="t",
            purpose=Purpose.TRAIN,
            prompt=prompt,
            keeps_states=keeps_states(self.algorithm),
        )
        self._see(each, 0)
        return each

    def _see(self, each, place):
        each.sequence.append_context(Segment.of([4 + place]))
        if each.states is not None:
            each.states.append(bytes([place]))

    @torch.no_grad()
    def _turn(self, running, place):
        tokens = torch.from_numpy(np.stack([each.sequence.whole().ids() for each in running]).astype(np.int64))
        every = torch.log_softmax(self.engine(tokens, use_cache=False).logits[:, -1].double(), -1).numpy()
        for each, logprobs in zip(running, every, strict=True):
            action = int(self.rng.choice(8, p=np.exp(logprobs)))
            logprob = np.array([logprobs[action]], dtype=LOGPROB).tobytes()
            each.sequence.append_sampled(Generated(Segment.of([action]), logprob, (VersionRun(Version(0, 0), 1),)))
            each.turns += 1
            each.turn_tokens.append(1)
            reward, done = self._bandit(action) if self.turns == 1 else self._stairs(each, action, place)
            each.turn_rewards.append(reward)
            if done:
                each.reward = math.fsum(each.turn_rewards)
            else:
                self._see(each, place[each.id])

    def _bandit(self, action):
        return (float(ARMS[action]) if action < 4 else 0.0), True

    def _stairs(self, each, action, place):
        move, reward = STAIRS[action % 3]
        if move < 0:
            return reward, True
        place[each.id] += move
        return (1.0, True) if place[each.id] == 3 else (reward, False)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
CORRECTED = {"correction": {"kind": "truncate", "cap": 5.0}}


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(
    "loss", [{"kind": "ppo"}, {"kind": "gspo", **BOUNDS}, {"kind": "cispo"}], ids=["ppo", "gspo", "cispo"]
)
def test_the_best_arm_is_found(loss, staleness):
    algorithm = {"epochs": 2, "minibatches": 2, "loss": loss | CORRECTED}
    assert World(algorithm, staleness=staleness, learning_rate=1e-2).train(20) > 0.95


@pytest.mark.parametrize("advantage", ["gigpo", "gae"])
def test_the_stairs_are_climbed(advantage):
    algorithm = {"advantage": advantage, "epochs": 2}
    if advantage == "gae":
        algorithm["value_learning_rate"] = 3e-2
    assert World(algorithm, turns=5, learning_rate=5e-3).train(30) > 0.95


def test_grpo_and_ppo_of_ones_own_train_exactly_like_the_built_in_ones():
    here = own_algorithms.HERE
    own = {
        "advantage": f"{here}same_as_grpo",
        "loss": {"kind": f"{here}same_as_ppo", "clip_low": 0.2, "clip_high": 0.2},
    }
    left, right = (World(algorithm, staleness=1, turns=5, learning_rate=0.01) for algorithm in ({}, own))
    assert left.train(4) == right.train(4)
    for name, weights in left.versions[-1].items():
        assert torch.equal(weights, right.versions[-1][name]), name
    assert not torch.equal(left.versions[0]["lm_head.weight"], left.versions[-1]["lm_head.weight"])


def test_a_loss_that_fails_in_a_run_is_named_and_changes_nothing():
    world = World({"loss": {"kind": f"{own_algorithms.HERE}of_the_wrong_shape"}})
    world._keep()
    batch = samples(advantage_of(world.algorithm), world.rollout(world.versions[-1]))
    (failed,) = world.driver.call(Train(1, Version(0, 1), tuple(batch)))
    assert isinstance(failed, TrainerFailed)
    assert "of_the_wrong_shape returned a loss of shape ()" in failed.reason
    world._keep()
    assert all(torch.equal(before, world.versions[1][name]) for name, before in world.versions[0].items())


def test_a_loss_that_overflows_in_a_run_is_named():
    world = World({"loss": {"kind": f"{own_algorithms.HERE}infinite"}}, max_skipped=1)
    world._keep()
    batch = samples(advantage_of(world.algorithm), world.rollout(world.versions[-1]))
    (failed,) = world.driver.call(Train(1, Version(0, 1), tuple(batch)))
    assert isinstance(failed, TrainerFailed)
    assert "so the model or the loss" in failed.reason
    assert "infinite overflowed" in failed.reason
