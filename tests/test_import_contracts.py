"""The import contracts bite: each is broken once on purpose, in a copy of the package, and only it complains."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACTS = ROOT / ".importlinter"

Plant = dict[str, str]
"""Files to write into the copy of `rollart`: path → content."""


def contract_names() -> dict[str, str]:
    """Contract name, as the linter prints it → contract id."""
    parser = configparser.ConfigParser()
    parser.read(CONTRACTS)
    prefix = "importlinter:contract:"
    return {parser[key]["name"]: key.removeprefix(prefix) for key in parser.sections() if key.startswith(prefix)}


def broken_contracts(folder: Path, plant: Plant) -> set[str]:
    """Lint a copy of the package with these files planted; the ids of the contracts that break."""
    shutil.copytree(ROOT / "src" / "rollart", folder / "rollart", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CONTRACTS, folder)
    for path, content in plant.items():
        target = folder / "rollart" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content + "\n")
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        cwd=folder,
        # Wide, so that no contract's name is wrapped over two lines.
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "300", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    verdicts = dict(re.findall(r"^(.*) (KEPT|BROKEN)\b.*$", result.stdout, re.MULTILINE))
    names = contract_names()
    assert set(verdicts) == set(names), f"a contract was not checked:\n{result.stdout}{result.stderr}"
    broken = {names[name] for name, verdict in verdicts.items() if verdict == "BROKEN"}
    assert (result.returncode == 0) == (not broken), result.stdout
    return broken


# For every contract a smallest violation first, then its finer points.
VIOLATIONS: list[tuple[str, Plant]] = [
    ("layers", {"types/planted.py": "import rollart.config.planted", "config/planted.py": ""}),
    ("layers", {"config/planted.py": "import rollart.policy"}),
    ("layers", {"policy/planted.py": "import rollart.ports.runtime"}),
    ("layers", {"ports/planted.py": "import rollart.control"}),
    ("layers", {"control/planted.py": "import rollart.observe"}),
    ("layers", {"observe/planted.py": "import rollart.control"}),
    ("layers", {"tasks/planted.py": "import rollart.backends"}),
    ("layers", {"distributed/planted.py": "import rollart.backends"}),
    ("layers", {"control/planted.py": "import rollart.sim"}),
    ("layers", {"sim/planted.py": "import rollart.app"}),
    ("layers", {"app/planted.py": "import rollart.bench"}),
    ("layers", {"bench/planted.py": "import rollart.cli"}),
    ("layers", {"ports/planted.py": "import rollart.conformance"}),
    ("layers", {"conformance/planted.py": "import rollart.backends"}),
    ("layers", {"helpers/__init__.py": ""}),
    ("sim-models-everything", {"sim/planted.py": "import rollart.backends"}),
    ("sim-models-everything", {"sim/planted.py": "import rollart.tasks"}),
    ("sim-models-everything", {"sim/planted.py": "import rollart.distributed"}),
    ("decisions-belong-to-control", {"backends/planted.py": "import rollart.policy"}),
    ("decisions-belong-to-control", {"observe/planted.py": "import rollart.policy"}),
    ("decisions-belong-to-control", {"distributed/planted.py": "import rollart.policy.routing"}),
    ("numerics-belong-to-backends", {"tasks/planted.py": "import rollart.algo"}),
    # An empty stand-in for the loss: the real one brings torch, which is another contract's business.
    ("numerics-belong-to-backends", {"algo/loss.py": "", "control/planted.py": "import rollart.algo.loss"}),
    (
        "backend-kinds-are-independent",
        {"backends/engines/planted.py": "import rollart.backends.trainers.planted", "backends/trainers/planted.py": ""},
    ),
    (
        "backend-kinds-are-independent",
        {
            "backends/environments/planted.py": "import rollart.backends.planted",
            "backends/planted.py": "import rollart.backends.rewards",
        },
    ),
    ("backend-kinds-are-independent", {"backends/stores/planted.py": "import rollart.backends.engines"}),
    (
        "backend-kinds-are-independent",
        {"backends/sandboxes/planted.py": "import rollart.backends.stores.planted", "backends/stores/planted.py": ""},
    ),
    ("sandbox-launcher-is-plain", {"backends/sandboxes/launcher/planted.py": "import msgspec"}),
    ("sandbox-launcher-is-plain", {"backends/sandboxes/launcher/planted.py": "import rollart.types.errors"}),
    ("decisions-are-pure", {"policy/planted.py": "import time"}),
    ("decisions-are-pure", {"policy/planted.py": "from asyncio import Event"}),
    (
        "decisions-are-pure",
        {"policy/planted.py": "def draw() -> float:\n    import random\n    return random.random()"},
    ),
    ("decisions-are-pure", {"types/planted.py": "import threading"}),
    ("decisions-are-pure", {"types/planted.py": "import socket"}),
    ("decisions-are-pure", {"config/planted.py": "import torch.nn"}),
    ("control-is-deterministic", {"control/planted.py": "import random"}),
    ("control-is-deterministic", {"control/planted.py": "import time"}),
    ("control-is-deterministic", {"control/planted.py": "import threading"}),
    ("control-is-deterministic", {"control/planted.py": "import socket"}),
    (
        "control-is-deterministic",
        {"control/planted.py": "import rollart.ports.planted", "ports/planted.py": "import torch"},
    ),
    ("layers", {"gateway/planted.py": "import rollart.backends"}),
    ("decisions-belong-to-control", {"gateway/planted.py": "import rollart.policy"}),
    ("dialects-are-data", {"gateway/openai/planted.py": "import asyncio"}),
    ("dialects-are-data", {"gateway/functions/planted.py": "import time"}),
    ("dialects-are-data", {"gateway/openai/planted.py": "from starlette.requests import Request"}),
    ("sim-is-light", {"sim/planted.py": "import torch"}),
    ("sim-is-light", {"sim/planted.py": "import rollart.observe.planted", "observe/planted.py": "import torch"}),
    ("ray-stays-in-distributed", {"tasks/planted.py": "import ray"}),
    ("ray-stays-in-distributed", {"app/planted.py": "import ray"}),
]

ALLOWED: dict[str, Plant] = {
    "the package as it is": {},
    "the event loop in control": {"control/planted.py": "import asyncio"},
    "advantages in control": {
        "control/planted.py": "from rollart.algo.advantage import planted",
        "algo/advantage.py": "import numpy\nplanted = 1",
    },
    "the policy of placement in the resource plane": {"distributed/planted.py": "import rollart.policy.placement"},
    "losses in trainers": {"backends/trainers/planted.py": "import rollart.algo.loss"},
    "stores and models in engines": {
        "backends/engines/planted.py": "import rollart.backends.models\nimport rollart.backends.stores"
    },
    "sandboxes in environments and rewards": {
        "backends/environments/planted.py": "import rollart.backends.sandboxes.bubblewrap",
        "backends/rewards/planted.py": "import rollart.backends.sandboxes.bubblewrap",
    },
    "the control plane in the simulator": {"sim/planted.py": "import rollart.control\nimport rollart.observe"},
    "ray in distributed, and distributed in the application": {
        "distributed/planted.py": "import ray",
        "app/planted.py": "import rollart.distributed.planted",
    },
}


@pytest.mark.parametrize(("contract", "plant"), VIOLATIONS, ids=[f"{c}: {next(iter(p))}" for c, p in VIOLATIONS])
def test_a_violation_breaks_its_contract_and_no_other(contract: str, plant: Plant, tmp_path: Path) -> None:
    assert broken_contracts(tmp_path, plant) == {contract}


@pytest.mark.parametrize("plant", ALLOWED.values(), ids=ALLOWED.keys())
def test_what_the_table_allows_breaks_nothing(plant: Plant, tmp_path: Path) -> None:
    assert broken_contracts(tmp_path, plant) == set()


def test_every_contract_is_shown_to_break() -> None:
    assert {contract for contract, _ in VIOLATIONS} == set(contract_names().values())
