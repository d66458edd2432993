"""Workers that declare how they are called and which hardware their calls prefer: the paper's first listing.

rollart cluster up --nodes cpu=1,H800=1,H20=1 --num-gpus 2
python examples/worker_cluster.py
rollart cluster down
"""

import sys

from rollart.distributed.cluster import Cluster
from rollart.distributed.code_travel import code_of_this_process
from rollart.distributed.ray_cluster import RayCluster
from rollart.distributed.resources import ResourceManager
from rollart.distributed.worker import Worker, hw_mapping, register


class ActorGen(Worker):
    """A stand-in for an inference engine: it answers with what it is."""

    def __init__(self, model):
        self.model, self.version = model, 0

    @hw_mapping(hw_affinity={"FrozenLake": "H800", "default": "H20"})
    def generate(self, prompts, tag_name="default"):  # lists are split over the ranks of the tag's class
        return [f"{tag_name} {prompt}: {self.model} v{self.version} on {self.resource}" for prompt in prompts]

    @register(mode="execute_all")
    def update(self, version):  # on every rank; results in rank order
        self.version = version
        return self.rank

    @register(mode="execute_rank_zero")
    def describe(self):
        return f"{self.ranks} ranks of {self.model}"


def main(address="auto"):
    with RayCluster(address, code_of_this_process()):
        manager = ResourceManager({"H800": 1}, {"H20": 2})
        with Cluster(ActorGen, {"H800": 1, "H20": 2}, "tiny", resources=manager) as actor_gen:
            print(actor_gen.describe())
            print("updated ranks", actor_gen.update(3))
            prompts = ["prompt 0", "prompt 1"]
            pending = actor_gen.generate.start(prompts, tag_name="FrozenLake")  # does not wait
            for answer in [*actor_gen.generate(prompts, tag_name="GEM-math"), *pending.result()]:
                print(answer)
        with Cluster(ActorGen, 1, "tiny", resources=manager, role="generation") as actor_gen:  # H20 only
            print(*actor_gen.generate(["prompt 0"], tag_name="FrozenLake"))
            print("because of", actor_gen.routes["generate", "FrozenLake"].why)


if __name__ == "__main__":
    main(*sys.argv[1:])
