"""The trained model: every run ends with a checkpoint, and prints where it is and how to load it."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_cli import COMMAND, MAZE, rollart, small_task

import rollart as api
from rollart.app.evaluation import as_model, config_for, find_checkpoint, play
from rollart.app.running import read_config
from rollart.backends.models import build_model
from rollart.backends.trainers.checkpoint import Checkpoints
from rollart.types.errors import TrainingFailed
from rollart.types.versions import Version

pytestmark = pytest.mark.timeout(300)
PATIENCE_S = 250.0
"""For a process that imports torch on a busy machine."""
LOADS = re.compile(r"^load it with: (.*)$", re.MULTILINE)
ONLY_THE_LAST = {"checkpoint_every": 0}


def loaded(stderr: str) -> Any:
    """The model that the closing message of a run loads; the printed code is run as it is."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    (expression,) = LOADS.findall(stderr)
    return eval(expression, {"AutoModelForCausalLM": AutoModelForCausalLM, "PeftModel": PeftModel})


def test_the_last_step_is_saved_and_from_pretrained_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = api.run("config.toml", out="run", **ONLY_THE_LAST)
    assert result.checkpoint == Checkpoints(Path("run/checkpoints")).folder(Version(0, 2))
    output = capfd.readouterr().err
    assert f"model: {result.checkpoint}\n" in output
    assert loaded(output).config.vocab_size == 260
    resumed = api.run(resume="run", steps=3)
    assert resumed.checkpoint == Checkpoints(Path("run/checkpoints")).folder(Version(1, 3))
    assert loaded(capfd.readouterr().err).config.vocab_size == 260
    assert rollart("audit", "run", cwd=tmp_path).code == 0


def test_the_command_says_it_too_and_eval_plays_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ("train", "config.toml", "--runtime", "inline", "--set", "checkpoint_every=0", "--out", "run", "--json")
    done = rollart(*words, cwd=tmp_path, timeout_s=PATIENCE_S)
    assert done.code == 0, done.err
    checkpoint = json.loads(done.out)["checkpoint"]
    assert f"model: {checkpoint}\n" in done.err
    assert loaded(done.err).config.vocab_size == 260
    played = rollart("eval", "run", "--episodes", "4", "--json", cwd=tmp_path)
    assert played.code == 0, played.err
    assert json.loads(played.out)["checkpoint"] == checkpoint


@pytest.mark.long
def test_of_lora_the_adapter_with_the_model_that_it_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed: pip install 'rollart[lora]'")
    import torch

    small_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = api.run("config.toml", out="run", trainer={"lora": {"rank": 2}, "learning_rate": 0.05})
    assert result.checkpoint is not None
    adapted = loaded(capfd.readouterr().err).eval()
    tokens = torch.arange(1, 31)[None]
    with torch.no_grad():
        trained = adapted(tokens).logits
        with adapted.disable_adapter():
            assert (adapted(tokens).logits - trained).abs().max() > 1e-3
    for folder in (Path("run"), result.checkpoint):
        run, checkpoint = find_checkpoint(folder)
        assert (run, checkpoint) == (Path("run"), result.checkpoint)
    config = read_config(Path("run"))
    with as_model(config, Path("run"), result.checkpoint) as model:
        with torch.no_grad():
            merged = build_model(str(model), dtype="float32", device="cpu")(tokens).logits
        torch.testing.assert_close(merged, trained, atol=1e-4, rtol=1e-4)
        assert asyncio.run(play(config_for(config, model, "", 4))).scored == 4
    assert not model.exists()


@pytest.mark.parametrize("path", [".", "../step-00000001.epoch-0"])
def test_a_checkpoint_is_found_from_inside_of_it(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001.epoch-0"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    monkeypatch.chdir(checkpoint)
    assert find_checkpoint(Path(path)) == (tmp_path / "run", checkpoint)


def test_a_last_checkpoint_that_cannot_be_saved_is_an_error_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All steps are trained, and the folder for checkpoints cannot be made."""
    in_the_way = "open('run/checkpoints', 'w').close()"
    small_task(tmp_path, MAZE.replace("        return f", f"        {in_the_way}\n        return f", 1))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainingFailed, match="a checkpoint could not be saved 3 times"):
        api.run("config.toml", out="run", **ONLY_THE_LAST)
    assert not LOADS.search(capfd.readouterr().err)
    (tmp_path / "run" / "checkpoints").unlink()
    (tmp_path / "maze.py").write_text(MAZE)
    sys.modules.pop(str(tmp_path / "maze.py"))  # where the inline runtime has it loaded
    assert api.run(resume="run").checkpoint == Checkpoints(Path("run/checkpoints")).folder(Version(1, 2))


FULL_AT_THE_END = """
set -e
mount -t tmpfs -o size=2m tmpfs disk
exec "$@" train config.toml --runtime inline --set checkpoint_every=0 --set model.config.hidden_size=512 --out disk/run
"""


@pytest.mark.long
def test_a_disk_that_is_full_at_the_last_save_is_an_error(tmp_path: Path) -> None:
    """Room for the journal, and not for a checkpoint of 3 MB."""
    own_mounts = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*own_mounts, "mount", "-t", "tmpfs", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    small_task(tmp_path)
    (tmp_path / "disk").mkdir()
    command = [*own_mounts, "sh", "-c", FULL_AT_THE_END, "sh", *COMMAND]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "step 2/2" in done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("rollart: TrainingFailed: a checkpoint could not be saved 3 times in a row")
    assert "No space left on device" in last
