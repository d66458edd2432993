"""A pipeline over four clusters, each on the hardware of its role: the paper's second listing.

    rollart cluster up --nodes cpu=1,H800=1,H20=1 --num-gpus 2
    python examples/resource_manager.py
    rollart cluster down

The policy is one number, the environment hides another, and the reward is higher the closer the guess: what matters
here is who runs where, and that the driver calls each stage as if it were one object.
"""

import random
import sys

from rollart.distributed.cluster import Cluster
from rollart.distributed.code_travel import code_of_this_process
from rollart.distributed.ray_cluster import RayCluster
from rollart.distributed.resources import ResourceManager
from rollart.distributed.worker import Worker, hw_mapping, register


class ActorTrain(Worker):
    def __init__(self):
        self.guess = 0.0

    @register(mode="execute_all")
    def train_step(self, tried, rewards):  # every rank takes the same step
        self.guess = tried[max(range(len(rewards)), key=rewards.__getitem__)]

    @register(mode="execute_rank_zero")
    def weights(self):
        return self.guess


class ActorGen(Worker):
    def __init__(self):
        self.guess, self.random = 0.0, random.Random(self.rank)

    @register(mode="execute_all")
    def update(self, guess):
        self.guess = guess

    @hw_mapping(hw_affinity={"default": "H20"})
    def generate(self, observations, tag_name="default"):
        return [self.guess + self.random.gauss(0.0, 1.0) for _ in observations]


class Environment(Worker):
    @register(mode="execute_rank_zero")
    def reset(self, count):
        return ["guess my number"] * count

    @register(mode="shard")
    def step(self, actions):
        return [abs(action - 7.0) for action in actions]


class Reward(Worker):
    @register(mode="shard")
    def compute_rewards(self, distances):
        return [-distance for distance in distances]


def main(address="auto", steps=20):
    manager = ResourceManager({"H800": 1}, {"H20": 2})
    with (
        RayCluster(address, code_of_this_process()),
        Cluster(ActorTrain, 1, resources=manager, role="train") as actor_train,
        Cluster(ActorGen, 2, resources=manager, role="generation") as actor_gen,
        Cluster(Environment, 2, resources=manager, role="environment") as environment,
        Cluster(Reward, 1, resources=manager, role="reward") as reward,
    ):
        for binding in manager.bindings:
            print(f"{binding.cluster} rank {binding.rank} on {binding.resource} {binding.why}".rstrip())
        for _ in range(int(steps)):
            actor_gen.update(actor_train.weights())
            actions = actor_gen.generate(environment.reset(8))
            rewards = reward.compute_rewards(environment.step(actions))
            actor_train.train_step(actions, rewards)
        print(f"learned: {actor_train.weights():.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
