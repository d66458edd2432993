"""What Harbor's own package says: `make test-harbor` installs it, with an interpreter of its own (Python 3.12)."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import harbor_folders
import pytest
from pydantic import BaseModel

from rollart.tasks.harbor import folders, schema
from rollart.tasks.repair.harbor import generate

LOADER = """
import json, sys
from harbor.models.task.task import Task
print(json.dumps({path: [Task.is_valid_dir(path), Task(path).instruction] for path in sys.argv[1:]}))
"""
FIELDS = """
import json
from harbor.models.task import config
names = ["TaskConfig", "AgentConfig", "VerifierConfig", "EnvironmentConfig", "VerifierCollectConfig", "ArtifactConfig",
         "SolutionConfig"]
print(json.dumps({name: sorted(getattr(config, name).model_fields) for name in names}))
"""
TABLES: dict[str, type[BaseModel]] = {
    "TaskConfig": schema.TaskToml,
    "AgentConfig": schema.AgentTable,
    "VerifierConfig": schema.VerifierTable,
    "EnvironmentConfig": schema.EnvironmentTable,
    "VerifierCollectConfig": schema.CollectTable,
    "ArtifactConfig": schema.ArtifactTable,
    "SolutionConfig": schema.SolutionTable,
}
CONVERTED = {"EnvironmentConfig": {"allow_internet"}}
"""Keys that are replaced before the tables are checked."""


def ask(code: str, *arguments: str) -> Any:
    program = os.environ.get("ROLLART_HARBOR", "")
    if not program:
        pytest.skip("ROLLART_HARBOR names no interpreter with harbor: make test-harbor")
    ran = subprocess.run([program, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_harbor_loads_the_tasks_of_repair(tmp_path: Path) -> None:
    made = [path for level in (2, 3) for path in generate(tmp_path / str(level), level=level, count=20)]
    for path, (valid, instruction) in ask(LOADER, *map(str, made)).items():
        assert valid, path
        assert instruction == folders.read(Path(path), roots={"python:*": str(tmp_path)}).instruction


def test_harbor_loads_the_ten_tasks(tmp_path: Path) -> None:
    found = ask(LOADER, *(str(path) for path in folders.find(harbor_folders.write_all(tmp_path)).values()))
    assert len(found) == 10
    for path, (valid, instruction) in found.items():
        assert valid, path
        assert instruction == folders.read(Path(path), roots={}).instruction


def test_every_key_of_the_format_is_known() -> None:
    for name, keys in ask(FIELDS).items():
        assert set(keys) - CONVERTED.get(name, set()) == set(TABLES[name].model_fields), name
