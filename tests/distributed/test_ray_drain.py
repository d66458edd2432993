"""The nodes of a machine drain by a command of their own, as in a container whose shell swallows SIGTERM."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from trial_nodes import trial_nodes

from rollart.distributed.ray_placement import read_nodes


def test_the_nodes_of_a_machine_drain_and_its_head_stays():
    with trial_nodes("cpu=1,H20=2", cpus=1) as cluster:
        variables = {"RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cluster.token}
        command = [sys.executable, "-m", "rollart.distributed.ray_drain"]
        environment = {**os.environ, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr
        assert "nodes of this machine that drained: 2" in done.stderr
        assert [node.is_head for node in read_nodes()] == [True]


def test_the_head_has_to_be_known():
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "rollart.distributed.ray_drain"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 1
    assert "RAY_ADDRESS is not set" in done.stderr
