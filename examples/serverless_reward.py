"""Rewards from functions: the cluster points an attribute of the reward workers at a URL, as in the paper's listing.

    rollart reward serve "$PWD/examples/serverless_reward.py:correct" --port 8004     # or deployed to your cloud
    rollart cluster up --nodes cpu=1,H800=1,H20=1 --num-gpus 2
    python examples/serverless_reward.py
    rollart cluster down

Without the URL, `self.correct` is the function itself: the worker does not know the difference.
"""

import sys

from rollart import Transcript
from rollart.distributed.cluster import Cluster
from rollart.distributed.code_travel import code_of_this_process
from rollart.distributed.ray_cluster import RayCluster
from rollart.distributed.resources import ResourceManager
from rollart.distributed.worker import Worker, register, register_serverless
from rollart.types.transcript import TranscriptTurn

URL = "http://127.0.0.1:8004/"


def correct(t: Transcript) -> float:
    return float(t.final_text.strip() == t.prompt["answer"])


def reward_class(url):
    class Reward(Worker):
        def __init__(self):
            self.correct = correct

        @register_serverless(attribute="correct", serverless_url=url)
        def compute_rewards(self, transcripts):
            return self.correct(transcripts)

        @register(mode="execute_all")
        def what_it_took(self):
            return self.correct.use.calls

    return Reward


def transcripts():
    """Multiplications, every third of them wrong."""
    for number in range(12):
        answer = str(number * 7)
        said = answer if number % 3 else "42?"
        yield Transcript(
            task="math",
            trajectory=number,
            prompt_id=str(number),
            seed=number,
            member=0,
            prompt={"answer": answer},
            turns=(TranscriptTurn(f"What is {number} * 7?", said),),
        )


def main(address="auto", url=URL):
    manager = ResourceManager({"H800": 1}, {"H20": 1})
    with (
        RayCluster(address, code_of_this_process()),
        Cluster(reward_class(url), 2, resources=manager, role="reward") as reward,
    ):
        rewards = reward.compute_rewards(list(transcripts()))
        print(f"rewards: {rewards}")
        print(f"calls per rank: {reward.what_it_took()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
