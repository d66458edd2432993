"""Files between nodes that share nothing: models, logs and checkpoints, with real processes that are killed."""

import json
import time

import pytest
from nodes import wait_until
from travelling_worker import BIG

CUT_S = 5.0
pytestmark = pytest.mark.timeout(400)


def test_models_logs_and_checkpoints_travel(cluster):
    driver = cluster.driver("travelling_driver.py", cluster.address, "kills")
    out, errors = driver.communicate(timeout=300)
    assert driver.returncode == 0, errors
    report = json.loads(out.splitlines()[-1])
    h800, h20 = (cluster.nodes[cluster.kinds.index(kind)] for kind in ("H800", "H20"))
    assert set(report["nodes"].values()) == {"H20", "H800"}

    # The model reached a node that did not have it, once, for both workers there.
    model = report["model"]
    assert model["folders"] == report["shared"]["folders"]
    assert all("/rollart-0/models/" in folder for folder in model["folders"])
    assert model["bytes"] == BIG + 2

    # The driver waited for the last lines of a process that crashed and had no time to send them.
    assert "its process ended" in report["crash"]

    # A trainer killed halfway through a transfer restarts on another node from the checkpoint before.
    assert report["saved"] == ["step-00000001.epoch-0"]
    assert "its process ended" in report["killed"]
    assert report["restored"] == "v0.1"
    assert report["kept"] == ["step-00000001.epoch-0", "step-00000002.epoch-1"]
    assert report["bytes"] == BIG

    # Nothing is left of what ended in order; scratch of the killed trainer waits for the next one on its node.
    assert report["closed"]
    assert left(h800, "checkpoints") == []
    assert left(h20, "checkpoints") == ["run-1"]
    wait_until(lambda: left(h800, "logs") == [])


def test_a_checkpoint_and_a_log_outlast_a_cut_of_their_link(cluster):
    driver = cluster.driver("travelling_driver.py", cluster.address, "cut")
    node = cluster.nodes[cluster.kinds.index("H20")]
    temporary = node.path().parent
    wait_until((temporary / "halfway").exists, seconds=100)
    node.cut()
    (temporary / "cut").touch()
    time.sleep(CUT_S)
    node.restore()
    out, errors = driver.communicate(timeout=200)
    assert driver.returncode == 0, errors
    assert json.loads(out.splitlines()[-1]) == {"bytes": BIG, "deaths": {}}
    assert left(node, "checkpoints") == []


def left(node, kind):
    root = node.path().parent / "rollart-0" / kind
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(".")) if root.is_dir() else []
