"""What is judged to be wrong with a node of a cluster, and with which remedy."""

import pytest

from rollart.app.cluster_doctor import NodeHealth, Versions, interpreters_on, judge, problems
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.types.placement import ACCELERATOR, Node

OURS = Versions("3.11.7", {"rollart": "0.1.0", "ray": "2.60.0", "torch": "2.13.0+cpu"})
NODE = Node("abcdef0123", "10.0.0.2", {ACCELERATOR: "H800"}, {"CPU": 8.0, "GPU": 2.0}, {})
FINE = {
    "host": "n2",
    "python": "3.11.9",
    "packages": {"rollart": "0.1.0", "ray": "2.60.0", "torch": "2.13.0+cu130"},
    "gpus": 2,
    "memory_bytes": 2 * 10**9,
    "disk_bytes": 10**9,
    "shared_bytes": 250 * 10**6,
    "link": {"trip_s": 0.001, "offset_s": -2.0},
    "interpreters": {},
}


def test_a_node_at_every_limit_is_fine():
    assert judge(NODE, FINE, OURS) == []
    assert judge(NODE, FINE | {"memory_bytes": None, "shared_bytes": None}, OURS) == []  # not known there


@pytest.mark.parametrize(
    ("change", "mark", "words"),
    [
        ({"problem": "no process can be run there: dead"}, "bad", "dead; restart its Ray node"),
        ({"python": "3.12.1"}, "bad", "Python 3.12.1 and the controller 3.11.7; install 3.11"),
        ({"packages": {**FINE["packages"], "ray": "2.59.0"}}, "bad", "pip install ray==2.60.0"),
        ({"packages": {**FINE["packages"], "rollart": ""}}, "bad", "has no rollart"),
        ({"packages": {**FINE["packages"], "torch": "2.12.0"}}, "bad", "pip install torch==2.13.0"),
        ({"packages": {**FINE["packages"], "torch": ""}}, "note", "only environments and rewards"),
        ({"gpus": 1}, "bad", "declares 2 GPUs and has 1"),
        ({"gpus": 3}, "note", "others stay unused"),
        ({"memory_bytes": 2 * 10**9 - 1}, "bad", "of memory free, 2 GB are needed"),
        ({"disk_bytes": 10**9 - 1}, "bad", "set TMPDIR"),
        ({"shared_bytes": 250 * 10**6 - 1}, "bad", "mount a larger /dev/shm"),
        ({"link": {"problem": "timed out"}}, "bad", "(timed out); allow TCP between the nodes"),
        ({"link": {"trip_s": 0.001, "offset_s": 2.1}}, "bad", "differs from the controller's by +2.1 s; run chrony"),
        ({"interpreters": {"/v/bin/python": {"problem": "it does not run"}}}, "bad", "/v/bin/python: it does not run"),
    ],
)
def test_what_is_wrong_has_a_remedy(change, mark, words):
    (finding,) = judge(NODE, FINE | change, OURS)
    assert finding.mark == mark
    assert words in finding.what
    assert problems([NodeHealth(NODE, {}, (finding,))], mark) == [f"H800 10.0.0.2 abcdef: {finding.what}"]


def test_the_interpreter_of_a_pool_may_have_another_torch_but_not_another_ray():
    packages = {"rollart": "0.1.0", "ray": "2.60.0", "torch": "2.9.0"}
    there = {"python": "3.11.7", "packages": packages, "missing": []}
    assert judge(NODE, FINE | {"interpreters": {"/v/python": there}}, OURS) == []
    there = there | {"packages": packages | {"ray": ""}, "missing": ["vllm"]}
    found = judge(NODE, FINE | {"interpreters": {"/v/python": there}}, OURS)
    assert [finding.what.partition(";")[0] for finding in found] == [
        "/v/python has no ray and the controller has 2.60.0",
        "/v/python has no vllm",
    ]


def test_a_trial_cluster_only_declares_its_gpus():
    (finding,) = judge(NODE, FINE | {"gpus": 0}, OURS, trial=True)
    assert finding.mark == "note"


def test_interpreters_are_looked_for_where_their_engines_may_run():
    pools = {
        "H800": {"accelerator": "H800", "engine": "vllm", "python": "/v/python"},
        "H20": {"accelerator": "H20", "python": "/w/python", "fallback": ["H800"]},
        "cpus": {"engines": 0, "python": "/x/python"},
    }
    config = check(RunConfig, {"tasks": {"maze": {}}, "pools": pools})
    assert interpreters_on(config, NODE) == {"/v/python": ("vllm",), "/w/python": ()}
    assert interpreters_on(config, Node("a", "", {ACCELERATOR: "H20"}, {}, {})) == {"/w/python": ()}
    assert interpreters_on(config, Node("a", "", {}, {}, {})) == {}
