"""`on_step`: the figures of every step, for those who log or stop early on their own."""

import asyncio
import json
from pathlib import Path

import own_algorithms as own
import pytest
from real_cli import rollart, small_task

import rollart as api
from rollart.app.step_callback import StepWatch, check_callback
from rollart.observe.journal import MemoryJournal
from rollart.types.errors import CallbackFailed
from rollart.types.ids import ClaimId
from rollart.types.journal import StepTrained
from rollart.types.versions import Version


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_local_function_sees_every_step_and_may_end_the_run(folder: Path) -> None:
    seen: list[api.StepRecord] = []

    def watch(step: api.StepRecord) -> api.Stop | None:
        seen.append(step)
        return api.Stop("seen enough") if step.step == 3 else None

    result = api.run("config.toml", steps=50, out="run", on_step=watch)
    assert [step.step for step in seen] == [1, 2, 3] == list(range(1, result.report.steps + 1))
    assert result.checkpoint is not None
    assert result.checkpoint.name.startswith("step-00000003")
    assert result.report.ended == "stopped by on_step after step 3: seen enough"
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["kept_rewards"] for line in lines if line["type"] == "step"] == [each.kept_rewards for each in seen]
    assert all(each.metrics["tokens"] > 0 and "maze" in each.rewards for each in seen)


def test_the_command_finds_it_by_its_path(folder: Path) -> None:
    done = rollart(
        *("train", "config.toml", "--runtime", "inline", "--out", "run"),
        *("--set", "steps=50", "--set", f"on_step={own.HERE}stop_after_two"),
        *("--set", f"algorithm.advantage={own.HERE}same_as_grpo", "--set", f"algorithm.loss.kind={own.HERE}reinforce"),
        cwd=folder,
    )
    assert done.code == 0, done.err
    assert "step 2/50" in done.err
    assert "step 3/50" not in done.err
    assert rollart("audit", "run", cwd=folder).code == 0


@pytest.mark.usefixtures("folder")
def test_an_exception_ends_the_run_by_name() -> None:
    def watch(step: api.StepRecord) -> None:
        raise ValueError(f"no disk at {step.step}")

    with pytest.raises(CallbackFailed, match=r"on_step .*watch raised ValueError after step 1: no disk at 1"):
        api.run("config.toml", out="run", on_step=watch)
    assert api.run(resume="run").report.steps == 2


def test_what_cannot_be_called_is_refused_before_the_run(folder: Path) -> None:
    with pytest.raises(api.RequestError, match=r"takes \(\); it is called with one argument"):
        api.run("config.toml", out="run", on_step=lambda: None)  # type: ignore[misc, arg-type]
    with pytest.raises(api.ConfigError, match=r"on_step: .*did you mean stop_after_two"):
        api.run("config.toml", out="run", on_step=f"{own.HERE}stop_after_to")
    assert not (folder / "run").exists()


def test_a_function_without_a_signature_is_taken() -> None:
    assert check_callback(max) is max


def asked(callback: object) -> str | None:
    async def main() -> str | None:
        watch = StepWatch(MemoryJournal(), callback)  # type: ignore[arg-type]
        watch.append(StepTrained(1.0, ClaimId(1), Version(0, 1), 0.5, {"loss": 1.0}))
        return await watch.on_step(1)

    return asyncio.run(main())


def test_it_may_be_a_coroutine() -> None:
    async def watch(step: api.StepRecord) -> api.Stop:
        await asyncio.sleep(0)
        return api.Stop(f"loss {step.metrics['loss']:g}")

    assert asked(watch) == "loss 1"


@pytest.mark.parametrize("answer", [True, "stop", 0])
def test_any_other_answer_is_an_error(answer: object) -> None:
    with pytest.raises(CallbackFailed, match=r'return None to go on, or rollart.Stop\("why"\)'):
        asked(lambda _: answer)
