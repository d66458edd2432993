"""The RayJob for Kubernetes: what it promises, and that it is one, by KubeRay's own schema."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

import yaml
from real_cli import small_task
from typer.testing import CliRunner

from rollart.app.launch.files import named_files, read_files
from rollart.app.launch.groups import NodeSize, node_groups
from rollart.app.launch.kuberay import KubeSettings, manifest
from rollart.app.launch.yaml_text import to_yaml
from rollart.cli.main import app
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.types.errors import RequestError
from rollart.types.placement import ACCELERATOR

SCHEMA = (
    Path(os.environ.get("KUBERAY_SCHEMAS", Path(__file__).parents[3] / "shared" / "kuberay")) / "rayjob-v1.schema.json"
)
POOLS = {
    "H800": {"engines": 3, "ranks": 4, "accelerator": "H800", "memory_gb": 10},
    "H20": {"engines": 1, "ranks": 1, "accelerator": "H20", "labels": {"zone": "a"}, "fallback": ["H800"]},
    "cpus": {"engines": 0, "labels": {"rollart/kind": "cpu"}},
}
TABLES = {
    "name": "My Run",
    "tasks": {"maze": {"environment": "envs/maze.py:Maze", "environment_pool": "cpus", "reward": "judge.py:judge"}},
    "pools": POOLS,
    "trainer": {"pool": "H800", "device": "cuda", "ranks": 2},
    "deadlines": {"drain_s": 90},
}
FILES = {"my.toml": "steps = 1\n", "envs/maze.py": "class Maze: ...\n"}


def objects_of(token="secret", **settings):
    config = check(RunConfig, TABLES)
    groups = node_groups(config, NodeSize(8, 32))
    return manifest(config, "my.toml", FILES, groups, KubeSettings("registry/rollart:1", "my-run", **settings), token)


def read(*arguments, **settings):
    """The objects as Kubernetes reads them, by kind and name."""
    found = yaml.safe_load_all(to_yaml(objects_of(*arguments, **settings)))
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in found}


def cluster_of(found):
    return found["RayJob/my-run"]["spec"]["rayClusterSpec"]


def test_the_parts_refer_to_each_other():
    found = read()
    assert sorted(found) == [
        "ConfigMap/my-run-environment",
        "ConfigMap/my-run-files",
        "PersistentVolumeClaim/my-run-runs",
        "RayJob/my-run",
        "Secret/my-run-token",
    ]
    cluster = cluster_of(found)
    assert cluster["authOptions"] == {"mode": "token", "secretName": "my-run-token"}
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in pods:
        (container,) = pod["template"]["spec"]["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": "my-run-environment"}}]
        (token,) = container["env"]
        assert token["name"] == "RAY_AUTH_TOKEN"
        assert token["valueFrom"]["secretKeyRef"] == {"name": "my-run-token", "key": "auth_token"}
    assert found["Secret/my-run-token"]["stringData"] == {"auth_token": "secret"}
    assert (
        "secret" not in json.dumps({key: each for key, each in found.items() if key != "Secret/my-run-token"}).split()
    )
    head = cluster["headGroupSpec"]["template"]["spec"]
    claims = {each["name"]: each.get("persistentVolumeClaim") for each in head["volumes"]}
    assert claims["runs"] == {"claimName": "my-run-runs"}
    data = found["ConfigMap/my-run-files"]["data"]
    items = next(each["configMap"]["items"] for each in head["volumes"] if "configMap" in each)
    assert {each["path"]: data[each["key"]] for each in items} == {**FILES, "start.sh": data["start.sh"]}


def test_the_job_resumes_and_ends_with_its_cluster():
    found = read()
    spec = found["RayJob/my-run"]["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["backoffLimit"] == 3
    assert spec["ttlSecondsAfterFinished"] > 0
    assert spec["entrypoint"] == "bash /etc/rollart/start.sh"
    start = found["ConfigMap/my-run-files"]["data"]["start.sh"]
    assert start.endswith("exec rollart train my.toml --out /runs/my-run --continue --address auto\n")
    start = read(code="/my code")["ConfigMap/my-run-files"]["data"]["start.sh"]
    assert "cd '/my code'\nexec rollart train /etc/rollart/my.toml" in start


def test_a_group_of_nodes_per_pool():
    cluster = cluster_of(read())
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert list(groups) == ["h800", "h20", "cpus", "others"]  # the reward has no pool
    large = groups["h800"]
    assert (large["replicas"], large["minReplicas"], large["maxReplicas"]) == (2, 2, 2)
    assert large["labels"] == {ACCELERATOR: "H800"}
    pod = large["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H800"}
    limits = pod["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "8"
    assert int(limits["memory"]) > 20 * 10**9
    assert large["rayStartParams"] == {"num-cpus": limits["cpu"], "num-gpus": "8"}
    assert groups["h20"]["labels"] == {"zone": "a", ACCELERATOR: "H20"}
    assert "nodeSelector" not in groups["cpus"]["template"]["spec"]
    assert cluster["headGroupSpec"]["rayStartParams"] == {
        "num-cpus": "0",
        "num-gpus": "0",
    }  # nothing runs beside the controller


def test_a_pod_that_is_deleted_drains_first():
    found = read()
    deadline_s = found["ConfigMap/my-run-environment"]["data"]["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
    assert deadline_s == "90"
    for group in cluster_of(found)["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > float(deadline_s)
        hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert hook == ["python", "-m", "rollart.distributed.ray_drain"]


def test_what_exists_already_is_used():
    selectors = {"H20": {"cloud.google.com/gke-accelerator": "nvidia-h20"}}
    found = read(secret="mine", claim="disk", selectors=selectors)
    assert not [key for key in found if key.startswith(("Secret", "PersistentVolumeClaim"))]
    cluster = cluster_of(found)
    assert cluster["authOptions"]["secretName"] == "mine"
    assert cluster["workerGroupSpecs"][1]["template"]["spec"]["nodeSelector"] == selectors["H20"]
    with pytest.raises(RequestError, match="--node-selector H200: there is no such pool"):
        read(selectors={"H200": {}})


def test_the_token_is_random_and_the_rest_is_not():
    first, second = (to_yaml(objects_of(token=None)) for _ in range(2))
    assert first != second
    assert to_yaml(objects_of()) == to_yaml(objects_of())


def test_files_that_the_config_names_go_along(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert named_files(check(RunConfig, TABLES)) == ["envs/maze.py", "judge.py"]
    (tmp_path / "judge.py").write_text("x = 'ä'\n")
    assert read_files(["judge.py"]) == {"judge.py": "x = 'ä'\n"}
    for name in ("not-there.py", "../judge.py", str(tmp_path / "judge.py")):
        with pytest.raises(RequestError, match="put it into the image"):
            read_files([name])
    (tmp_path / "large.txt").write_text("x" * 900_001)
    with pytest.raises(RequestError, match="more than a ConfigMap holds"):
        read_files(["large.txt"])


@pytest.mark.skipif(
    not SCHEMA.is_file(), reason="no schema of KubeRay: set KUBERAY_SCHEMAS to the folder of rayjob-v1.schema.json"
)
def test_the_job_is_valid_by_the_schema_of_kuberay():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text())
    for settings in ({}, {"secret": "mine", "claim": "disk", "code": "/code", "retries": 0}):
        job = read(**settings)["RayJob/my-run"]
        jsonschema.validate(job, schema)
        assert unknown_keys(job, schema) == []


def unknown_keys(value, schema, path=""):
    """Keys that the schema does not have: the API server would drop them without a word."""
    if isinstance(value, list):
        return [key for each in value for key in unknown_keys(each, schema.get("items", {}), path)]
    known = schema.get("properties")
    if not isinstance(value, dict) or known is None:
        return []
    return [
        found
        for key, each in value.items()
        for found in (unknown_keys(each, known[key], f"{path}.{key}") if key in known else [f"{path}.{key}"])
    ]


def test_a_manifest_that_replaces_a_file_is_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the token of the cluster."""
    small_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").touch(mode=0o644)
    done = CliRunner().invoke(app, ["deploy", "kuberay", "config.toml", "--image", "rollart:1", "--out", "job.yaml"])
    assert done.exit_code == 0, done.output
    assert "auth_token" in Path("job.yaml").read_text()
    assert Path("job.yaml").stat().st_mode & 0o777 == 0o600
