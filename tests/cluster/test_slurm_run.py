"""A whole run by the batch script for Slurm, whose commands are played by small scripts on this machine."""

import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from real_cli import CONFIG, rollart, small_task

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from rollart.distributed import ray_reaper
from rollart.observe.journal import fold_journal, read_journal
from rollart.types.journal import CheckpointSaved, RunResumed, StepTrained, WorkerLeaves

pytestmark = pytest.mark.long
PATIENCE_S = 300.0
PLAYED = {
    "scontrol": """
case "$1" in
    show) hostname ;;
    requeue) echo "$2" > "$PLAY/requeued" ;;
esac
""",
    "srun": """
while [ "${1#-}" != "$1" ]; do
    case "$1" in --nodes=*) nodes=${1#--nodes=} ;; esac
    shift
done
for _ in $(seq "$nodes"); do
    {
        flock 9  # nodes of one machine start one after the other
        log=$(mktemp "$PLAY/node-XXXX")
        "$@" > "$log" 2>&1 9>&- &
        echo $! >> "$PLAY/steps"
        until grep -q "Ray runtime started" "$log" || ! kill -0 $!; do sleep 0.1; done
    } 9> "$PLAY/lock"
done
wait
""",
    "scancel": """
[ "$1" = --signal=TERM ] || exit 1
while read -r step; do kill -TERM "$step"; done < "$PLAY/steps"
""",
}


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Played:
    """A machine on which Slurm is played."""

    def __init__(self, folder):
        # Short, because Ray puts sockets there, whose paths are limited in length.
        self.tmp = Path(tempfile.mkdtemp(prefix="sl-"))
        self.folder, self.job = folder, str(os.getpid())
        (self.tmp / "bin").mkdir()
        for name, body in PLAYED.items():
            path = self.tmp / "bin" / name
            path.write_text("#!/bin/bash\n" + body)
            path.chmod(0o755)

    @contextmanager
    def batch(self):
        """The script, started as Slurm does. `ray_reaper` finds all that it started."""
        (self.tmp / "steps").unlink(missing_ok=True)
        (self.tmp / "requeued").unlink(missing_ok=True)
        slurm = {f"SLURM_JOB_NODELIST_HET_GROUP_{group}": "here" for group in range(2)}
        variables = {"SLURM_JOB_ID": self.job, "PLAY": str(self.tmp), ray_reaper.MARK: str(self.ray), **slurm}
        environment = {**os.environ, **variables, "PATH": f"{self.tmp / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        with self.log.open("w") as log:  # not a pipe, which the steps would hold open
            process = subprocess.Popen(["bash", "job.sh"], cwd=self.folder, env=environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            ray_reaper.reap(str(self.ray))  # Slurm ends the steps

    @property
    def log(self):
        return self.tmp / "job.log"

    @property
    def ray(self):
        return Path("/tmp", f"ray-{self.job}")

    def requeued(self):
        return (self.tmp / "requeued").is_file()


def test_a_job_drains_at_its_notice_is_requeued_and_resumes(tmp_path):
    """Two machines, both this one: one of pool H20, and one of pool cpus; and the head."""
    small_task(tmp_path)
    pools = '[pools.H20]\naccelerator = "H20"\nranks = 1\n[pools.cpus]\nengines = 0\nlabels = { kind = "cpu" }\n'
    config = CONFIG.replace("[pools.local]", pools).replace("steps = 2\ncheckpoint_every = 1", "steps = 16")
    config = config.replace("[batch]", '[deadlines]\ndrain_s = 60\n[trainer]\npool = "cpus"\n[batch]')
    config = config.replace('name = "small"', 'name = "small"\nreward_pool = "cpus"')
    config = config.replace("max_turns", 'environment_pool = "cpus"\ninject = { latency_ms = 50.0 }\nmax_turns')
    (tmp_path / "config.toml").write_text(config)
    words = ("deploy", "slurm", "config.toml", "--run", "run", "--gpus-per-node", "1", "--out", "job.sh")
    done = rollart(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert stat.S_IMODE((tmp_path / "job.sh").stat().st_mode) == 0o600
    played = Played(tmp_path)
    try:
        with played.batch() as job:
            wait_until(lambda: "step 3/" in played.log.read_text() or job.poll() is not None, PATIENCE_S)
            assert job.poll() is None, played.log.read_text()
            (token,) = tmp_path.glob(".token-*")
            assert stat.S_IMODE(token.stat().st_mode) == 0o600
            job.send_signal(signal.SIGTERM)
            assert job.wait(PATIENCE_S) == 0, played.log.read_text()
        assert played.requeued(), played.log.read_text()
        assert not token.exists()
        assert "its nodes drain" in played.log.read_text()
        with played.batch() as job:  # as Slurm starts it again
            assert job.wait(PATIENCE_S) == 0, played.log.read_text()
        assert not played.requeued()
    finally:
        shutil.rmtree(played.tmp, ignore_errors=True)
        shutil.rmtree(played.ray, ignore_errors=True)
    violations, report = fold_journal(tmp_path / "run" / "journal.sqlite")[1].finish()
    assert (violations, report is None) == ([], False)
    events = list(read_journal(tmp_path / "run" / "journal.sqlite"))
    # The trainer's node drained: it saved, although no checkpoint was due, so nothing was trained twice.
    assert any(isinstance(event, WorkerLeaves) and event.worker.startswith("trainer/") for event in events)
    assert sum(isinstance(event, CheckpointSaved) for event in events) == 2
    assert [event.version.step for event in events if isinstance(event, StepTrained)] == list(range(1, 17))
    assert sum(isinstance(event, RunResumed) for event in events) == 1
