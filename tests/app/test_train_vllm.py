"""`rollart train` with a vLLM engine: in one environment, and with the engine in an environment of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_cli import COMMAND

from rollart.backends.models import build_model
from rollart.observe.journal import fold_journal, read_journal
from rollart.types.journal import EngineUpdated, StepTrained, WorkerDied
from rollart.types.versions import Version

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
HAS_VLLM = importlib.util.find_spec("vllm") is not None
MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
STEPS = 4
SETTINGS = (
    "model=model",
    f"steps={STEPS}",
    "eval_every=0",
    "batch.trajectories=8",
    "batch.group_size=4",
    "tasks.frozenlake.environments=8",
    "pools.local.engine=vllm",
    "pools.local.slots=8",
    "pools.local.vllm={gpu_memory_utilization=0.2,enforce_eager=true,block_size=32,kv_cache_memory_bytes=268435456}",
    "deadlines.model_loads_s=500",
)
OURS = "ROLLART_TEST_RUN"


def train(folder: Path, python: str, *words: str) -> None:
    """A whole run, and all that must hold after it."""
    build_model({"config": MODEL}, dtype="float32", device="cpu", seed=0).save_pretrained(folder / "model")
    command = [python, *COMMAND[1:], "train", "frozenlake", "--json", "--out", "run", *words]
    for assignment in SETTINGS:
        command += ["--set", assignment]
    # The mark is inherited by all that the run starts; vLLM's titles would hide it (see `ray_local`).
    environment = {**os.environ, OURS: str(folder), "SPT_NOENV": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "did not close" not in done.stderr
    assert "did not end" not in done.stderr
    assert json.loads(done.stdout)["steps"]
    assert not marked(folder)
    journal = folder / "run" / "journal.sqlite"
    violations, _ = fold_journal(journal)[1].finish()
    assert not violations
    events = list(read_journal(journal))
    assert not [event for event in events if isinstance(event, WorkerDied)]
    trained = [event.version for event in events if isinstance(event, StepTrained)]
    assert trained == [Version(0, step) for step in range(1, STEPS + 1)]
    served = [event.version for event in events if isinstance(event, EngineUpdated)]
    assert served == [Version(0, step) for step in range(len(served))]
    assert len(served) >= STEPS


def marked(folder: Path) -> list[str]:
    """Processes of the run that are still there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{OURS}={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # gone, or another user's
            continue
    return found


@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM: `make test-vllm` runs it in an environment of its own")
@pytest.mark.parametrize("runtime", ["ray", "inline"])
def test_training_with_vllm(tmp_path: Path, runtime: str) -> None:
    train(tmp_path, sys.executable, "--runtime", runtime)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="needs .venv-vllm: `make venv-vllm` builds it")
def test_training_with_vllm_in_an_environment_of_its_own(tmp_path: Path) -> None:
    controller = ROOT / ".venv" / "bin" / "python" if HAS_VLLM else Path(sys.executable)
    if not controller.exists():
        pytest.skip("needs .venv for the controller: `make venv` builds it")
    train(tmp_path, str(controller), "--set", f"pools.local.python={VLLM_PYTHON}")
