"""Checkpoints outside of the run folder: in a shared folder, or at a URL. A run is resumed and evaluated from there."""

from pathlib import Path

import pytest
from real_cli import small_task

import rollart as api
from rollart.app.evaluation import find_checkpoint
from rollart.app.running import new_run, resumed_run
from rollart.config.load import load_toml
from rollart.types.errors import ConfigError

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("kind", ["shared folder", "URL"])
def test_a_run_keeps_its_checkpoints_elsewhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "elsewhere" / "run-1"
    url = str(place) if kind == "shared folder" else place.as_uri()
    first = api.run("config.toml", out="run", checkpoint_url=url, checkpoint_every=1)
    assert f"model: {url}/step-00000002.epoch-0\n" in capfd.readouterr().err
    resumed = api.run(resume="run", steps=3)
    assert sorted(path.name for path in place.iterdir()) == ["step-00000002.epoch-0", "step-00000003.epoch-1"]
    for result in (first, resumed):
        assert result.checkpoint is not None
        assert result.checkpoint.is_relative_to(place) == (kind == "shared folder")
    assert resumed.checkpoint is not None
    assert (resumed.checkpoint / "model.safetensors").is_file()
    folder, checkpoint = find_checkpoint(Path("run"))
    assert (folder, checkpoint.absolute()) == (Path("run"), resumed.checkpoint.absolute())
    assert not list((tmp_path / "run").glob("checkpoints/step-00000002*"))
    with pytest.raises(ConfigError, match="cannot change when a run is resumed"):
        resumed_run(Path("run"), lambda tables: {**tables, "checkpoint_url": ""})
    with pytest.raises(ConfigError, match="already holds checkpoints, the last that of step 3"):
        new_run({**load_toml(Path("config.toml")), "checkpoint_url": url})


def test_a_url_that_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"checkpoint_url: .*Protocol not known"):
        new_run({**load_toml(Path("config.toml")), "checkpoint_url": "unheard://of/run-1"})
