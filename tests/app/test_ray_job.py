"""A run as a Ray Job: the command, and a real job on the trial cluster that trains to its end."""

import importlib.util
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from real_cli import rollart, small_task

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from rollart.app.launch.ray_job import job_command
from rollart.observe.journal import fold_journal
from rollart.types.errors import RequestError

SERVER = importlib.util.find_spec("aiohttp") is not None and importlib.util.find_spec("opencensus") is not None
WRAPPER = '#!/bin/sh\nexec {python} -m rollart "$@"\n'


def test_the_command_is_one_for_a_shell(tmp_path):
    small_task(tmp_path)
    words = ("deploy", "ray-job", "config.toml", "--run", "/data/first", "--address", "http://10.0.0.1:8265")
    done = rollart(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    command = shlex.split(done.out)
    assert command[:3] == ["ray", "job", "submit"]
    assert command[command.index("--address") + 1] == "http://10.0.0.1:8265"
    assert command[command.index("--working-dir") + 1] == str(tmp_path)
    entrypoint = "rollart train config.toml --out /data/first --continue --address auto"
    assert command[command.index("--") + 1 :] == entrypoint.split()


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(RequestError, match="--run runs/first: give an absolute path"):
        job_command("my.toml", "runs/first", "http://10.0.0.1:8265", tmp_path)
    small_task(tmp_path)
    done = rollart("deploy", "ray-job", tmp_path / "config.toml", "--run", "/data/first", cwd=tmp_path)
    assert done.code == 2
    assert "is outside of this folder" in done.err


def test_a_cluster_that_is_to_take_jobs_says_what_it_lacks(tmp_path):
    if SERVER:
        pytest.skip("ray[default] is installed")
    done = rollart("cluster", "up", "--jobs", cwd=tmp_path, TMPDIR=str(tmp_path))
    assert done.code == 2
    assert "pip install 'rollart[jobs]'" in done.err


@pytest.mark.skipif(not SERVER, reason="Ray's job server is not installed: pip install 'rollart[jobs]'")
@pytest.mark.timeout(600)
def test_a_job_on_the_trial_cluster_trains_to_its_end(tmp_path):
    # Short, because Ray puts sockets there, whose paths are limited in length.
    tmp = Path(tempfile.mkdtemp(prefix="rj-"))
    (tmp / "bin").mkdir()
    wrapper = tmp / "bin" / "rollart"  # the job's shell finds the command by its name
    wrapper.write_text(WRAPPER.format(python=sys.executable))
    wrapper.chmod(0o755)
    variables = {"TMPDIR": str(tmp), "PATH": f"{tmp / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    code, run = tmp_path / "code", tmp_path / "data" / "first"
    code.mkdir()
    small_task(code)
    try:
        done = rollart("cluster", "up", "--nodes", "cpu=2", "--jobs", cwd=tmp, **variables)
        assert done.code == 0, done.err
        words = ("deploy", "ray-job", "config.toml", "--run", run, "--submit")
        done = rollart(*words, cwd=code, **variables)
        assert done.code == 0, done.out + done.err
        violations, report = fold_journal(run / "journal.sqlite")[1].finish()
        assert (violations, report is None) == ([], False)
        assert report.steps == 2
    finally:
        done = rollart("cluster", "down", cwd=tmp, **variables)
        shutil.rmtree(tmp)
    assert done.code == 0, done.err
