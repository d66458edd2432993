"""`rollart train --runtime ray`: the same run with every worker in a process of its own."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.app.compose import process_store
from rollart.app.running import RuntimeKind, require
from rollart.backends.stores.folder import FolderStore
from rollart.backends.stores.shared import SharedMemoryStore
from rollart.cli.train import config_file
from rollart.config.load import check, load_toml
from rollart.config.schema import RunConfig
from rollart.observe.journal import fold_journal
from rollart.types.errors import RequestError

SMALL = (
    "steps=2",
    "eval_every=0",
    "checkpoint_every=2",
    "batch.trajectories=8",
    "batch.group_size=4",
    "tasks.frozenlake.environments=8",
)


@pytest.mark.long
def test_two_steps_with_all_workers_in_processes(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
    words = ["train", "frozenlake", "--json", "--out", "run"]
    for assignment in SMALL:
        words += ["--set", assignment]
    command = [sys.executable, "-c", "from rollart.cli.main import main; main()", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"]
    violations, report = fold_journal(tmp_path / "run" / "journal.sqlite")[1].finish()
    assert not violations
    assert report is not None
    logs = {str(path.relative_to(tmp_path / "run" / "logs")) for path in (tmp_path / "run" / "logs").rglob("*.log")}
    assert logs == {
        "engine/local/0.0.log",
        "environment/frozenlake/0.0.log",
        "reward/frozenlake/0.0.log",
        "trainer/0.0.log",
    }
    assert any((tmp_path / "run" / "checkpoints").iterdir())


def test_the_weights_lie_in_shared_memory_where_their_size_is_known(tmp_path: Path) -> None:
    tables = load_toml(config_file("frozenlake"))
    with process_store(check(RunConfig, tables), tmp_path) as store:
        assert isinstance(store, SharedMemoryStore)
    with pytest.raises(Exception, match="no shared store"):
        store.newest()
    other = {**tables, "model": {"config": {"model_type": "gpt2", "vocab_size": 64}}}
    with process_store(check(RunConfig, other), tmp_path) as store:
        assert isinstance(store, FolderStore)


def test_a_missing_ray_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    require(RuntimeKind.INLINE)
    with pytest.raises(RequestError, match=r"needs ray; install .*rollart\[train\]"):
        require(RuntimeKind.RAY)
