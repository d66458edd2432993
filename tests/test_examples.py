"""The examples run as they are, on a trial cluster with labelled nodes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from reward_server import RewardServer
from trial import Trial

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def trial():
    cluster = Trial("cpu=1,H800=1,H20=1", "--num-gpus", "2")
    yield cluster
    cluster.close()


def run(trial, name, *arguments):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        cwd=EXAMPLES,
        env={**os.environ, "TMPDIR": trial.tmp, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_calls_go_to_the_hardware_of_their_tag(trial):
    assert run(trial, "worker_cluster.py") == [
        "3 ranks of tiny",
        "updated ranks [0, 1, 2]",
        "GEM-math prompt 0: tiny v3 on H20",
        "GEM-math prompt 1: tiny v3 on H20",
        "FrozenLake prompt 0: tiny v3 on H800",
        "FrozenLake prompt 1: tiny v3 on H800",
        "FrozenLake prompt 0: tiny v0 on H20",
        "because of no rank on H800",
    ]


def test_every_stage_has_the_hardware_of_its_role(trial):
    *bindings, learned = run(trial, "resource_manager.py")
    assert bindings == [
        "ActorTrain rank 0 on H800",
        "ActorGen rank 0 on H20",
        "ActorGen rank 1 on H20",
        "Environment rank 0 on CPU",
        "Environment rank 1 on CPU",
        "Reward rank 0 on local",
    ]
    assert abs(float(learned.removeprefix("learned: ")) - 7.0) < 1.0


def test_an_attribute_of_reward_workers_is_a_function_behind_a_url(trial):
    with RewardServer(f"{EXAMPLES / 'serverless_reward.py'}:correct") as server:
        rewards, calls = run(trial, "serverless_reward.py", "auto", server.url)
    assert rewards == f"rewards: {[float(bool(number % 3)) for number in range(12)]}"
    assert calls == "calls per rank: [6, 6]"
    assert len(server.seen) == 12


def test_the_student_comes_closer_to_its_teacher(trial):
    lines = run(trial, "distillation.py", "auto", "40")
    found = [float(re.fullmatch(r"step \d+: KL of the student from the teacher ([\d.]+)", line)[1]) for line in lines]
    assert len(found) == 5
    assert found[-1] < 0.5 * found[0], found
