"""A trainer whose ranks are on several nodes of a run: the loss of a node costs the steps since the last checkpoint.

Takes minutes: `make test-long`.
"""

import pytest
from node_runs import CONFIG, Run
from ray_nodes import RayNodes

from rollart.types.journal import CheckpointSaved, StepTrained, WorkerDied, WorkerJoined

pytestmark = pytest.mark.long

RANKS = 4
START_S = 400.0
"""Four processes import torch on few cores."""
TRAINER = f"""
[trainer]
pool = "H800"
ranks = {RANKS}
"""
TITLES = """
from pathlib import Path
for entry in Path("/proc").glob("[0-9]*"):
    print((entry / "cmdline").read_bytes())
"""
POOLS = """
[pools.cpu]
cpus = 0.2

[pools.H800]
accelerator = "H800"
engines = 0

[model.config]"""


def config():
    """One engine beside the environments; the H800 nodes are for the trainer, and a rank takes half of one."""
    before, _, rest = CONFIG.partition("\n[trainer]\n")
    rest = rest.partition("\n[tasks.long]\n")[2].replace('hardware = "H800"\n', "").replace('hardware = "H20"\n', "")
    tasks, _, model = rest.partition("\n[pools.cpu]\n")
    tasks = tasks.replace("environments = 8", "environments = 8\nenvironment_cpus = 0.2")
    model = model.partition("[model.config]")[2]
    return f"{before}\n{TRAINER}\n[tasks.long]\n{tasks}\n{POOLS}{model}"


def test_killing_the_node_of_ranks_costs_the_steps_since_the_last_checkpoint():
    with RayNodes("cpu", "H800", "H800", "H800", cpus=2, gpus=0) as cluster, Run(cluster, config()) as run:
        run.until(lambda events: any(isinstance(event, CheckpointSaved) for event in events), START_S)
        logs = {path.name: path.read_text() for path in run.head.path("run/logs/trainer").iterdir()}
        assert {f"0.0.rank-{rank}.log" for rank in range(1, RANKS)} <= logs.keys()
        victim = next(node for node in cluster.nodes[1:] if _hosts_only_others(node))
        victim.kill()
        died = run.until(lambda events: [event for event in events if isinstance(event, WorkerDied)])
        assert "TrainerLost: rank" in died[0].reason
        assert victim.address in died[0].reason
        run.until(lambda events: any(_again(event) for event in events), START_S)
        run.until_steps(2, START_S)
        events = run.finish()
    assert {event.worker for event in events if isinstance(event, WorkerDied)} == {"trainer/0.0"}
    first = next(event for event in events if isinstance(event, StepTrained) and event.at > died[0].at)
    saved = [event.version.step for event in events if isinstance(event, CheckpointSaved) and event.at < died[0].at]
    assert first.version.step == saved[-1] + 1


def _again(event):
    return isinstance(event, WorkerJoined) and event.worker == "trainer/0.1"


def _hosts_only_others(node):
    """Whether ranks run on the node, and rank 0 does not."""
    titles = node.python("-c", TITLES)
    return "_RankHost" in titles and "rollart: trainer" not in titles
