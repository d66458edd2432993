"""A run as a Ray Job: the cluster's head runs the controller, with the code of this folder."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollart.distributed.node_environment import ENVIRONMENT
from rollart.types.errors import RequestError

RUN_COMMAND = "rollart"
EXCLUDED = ["runs/", ".venv*/", "*.safetensors"]
"""Never code, and often large."""


def job_command(config: str, run: str, address: str, working_dir: Path) -> list[str]:
    """`ray job submit …`, for a shell or for `submit`.

    The run folder is one of the head's disk: the job's own folder is a copy of `working_dir` and ends with it. A job
    that is submitted again resumes the run.
    """
    if not run.startswith("/"):
        raise RequestError(
            f"--run {run}: give an absolute path on the cluster's head; the folder of a job ends with it"
        )
    train = [RUN_COMMAND, "train", config, "--out", run, "--continue", "--address", "auto"]
    environment = json.dumps({"excludes": EXCLUDED}, separators=(",", ":"))
    where = ["--address", address, "--working-dir", str(working_dir), "--runtime-env-json", environment]
    return ["ray", "job", "submit", *where, "--", *train]


def as_shell(command: Sequence[str]) -> str:
    """One line for a shell."""
    return shlex.join(command)


def submit(command: Sequence[str], variables: Mapping[str, str], environment: Mapping[str, str]) -> int:
    """Submit the job and follow its output to its end; the exit code of the job's submission."""
    line = [sys.executable, "-m", "ray.scripts.scripts", *command[1:]]
    authenticated = {"RAY_AUTH_MODE": ENVIRONMENT["RAY_AUTH_MODE"], **variables}
    return subprocess.run(line, env={**environment, **authenticated}, check=False).returncode
