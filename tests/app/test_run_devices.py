"""Resolving `auto` for real runs, and what `--dry-run` shows of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollart.app.compose import first_workers, worker_specs
from rollart.app.devices import leave_split, plan_devices, size_of
from rollart.backends.engines.checkpoint_config import read_shape
from rollart.cli.render import show_devices
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.observe.journal import SqliteJournal
from rollart.types.errors import ConfigError, RequestError
from rollart.types.messages import Role
from rollart.types.placement import ACCELERATOR, Node

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def config(engines: Any = "auto", *, trainer: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    tables = {
        "tasks": {"maze": {"environment": "rollart.tasks.frozenlake:FrozenLake", "max_turns": 4}},
        "pools": {"H800": {"engines": engines, "accelerator": "H800", "ranks": 1, "device": "cuda", "cpus": 0}},
        "trainer": {"ranks": "auto", "device": "cuda", "pool": "H800", "cpus": 0, **(trainer or {})},
        "model": {"config": MODEL | model},
    }
    return check(RunConfig, tables)


def nodes(gpus: int = 8) -> list[Node]:
    total = {"GPU": float(gpus), "CPU": 64.0, "memory": 1e12}
    return [Node("n1", "10.0.0.1", {ACCELERATOR: "H800"}, total, {})]


def test_a_config_is_resolved_for_the_nodes() -> None:
    plan = plan_devices(config(), nodes())
    pool = plan.config.pools["H800"]
    assert plan.chosen
    assert plan.split.fits
    assert plan.config.trainer.ranks >= 1
    assert pool.range.min == 1
    assert pool.range.start == plan.split.engines["H800"] >= 1
    assert plan.config.trainer.ranks + pool.range.first <= 8
    assert pool.range.max >= 16


def test_a_config_of_numbers_stays_as_it_is() -> None:
    declared = config(3, trainer={"ranks": 2})
    plan = plan_devices(declared, nodes())
    assert plan.config == declared
    assert not plan.chosen


def test_this_machine_is_split_too_without_gpus() -> None:
    plan = plan_devices(config(), None)
    assert plan.config.trainer.ranks >= 1
    assert plan.config.pools["H800"].range.first >= 1


def test_the_memory_is_shown_with_its_arithmetic() -> None:
    console = Console(width=120, record=True)
    show_devices(console, plan_devices(config({"min": 1, "max": 4}), nodes()))
    text = console.export_text()
    assert "devices: " in text
    assert "(estimated)" in text
    for line in ("4 · P / r", "8 · P / r", "kv_mib / g", "of 80.00 GB"):
        assert line in text
    assert "does not fit" not in text


def test_an_engine_that_does_not_fit_is_shown() -> None:
    made = config({"min": 1, "max": 4})
    pool = made.pools["H800"].model_copy(update={"kv_mib": 100_000.0})
    console = Console(width=120, record=True)
    show_devices(console, plan_devices(made.model_copy(update={"pools": {"H800": pool}}), nodes()))
    assert "does not fit" in console.export_text()


def test_training_that_cannot_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(RequestError, match=r"does not fit: even with 64 ranks .*logits .* GB"):
        plan_devices(config(trainer={"token_budget": 10**7}), nodes())


def test_the_parameters_are_those_of_the_model() -> None:
    tied, untied = (size_of(read_shape({"config": MODEL | {"tie_word_embeddings": tied}})) for tied in (True, False))
    assert untied.parameters - tied.parameters == 1000 * 1024
    assert untied.kv_bytes == 4 * 8 * 2 * 128


def test_a_run_starts_with_its_first_engines_and_needs_only_the_least() -> None:
    made = config({"min": 1, "max": 5, "start": 3}, trainer={"ranks": 1})

    def engines(specs: Any) -> int:
        return sum(spec.role is Role.ENGINE for spec in specs)

    assert engines(worker_specs(made, None, None)) == 5
    assert engines(first_workers(made)) == 3
    assert engines(first_workers(made, least=True)) == 1


def test_a_split_is_left_for_the_next_session(tmp_path: Path) -> None:
    leave_split(tmp_path, plan_devices(config(2, trainer={"ranks": 3}), nodes()))
    assert (tmp_path / "devices.json").read_text() == '{"ranks":3,"engines":{"H800":2}}\n'


def test_a_damaged_split_does_not_stop_a_resume(tmp_path: Path) -> None:
    """Earlier versions wrote it in place, so that a power loss could leave it empty."""
    (tmp_path / "journal.sqlite").touch()
    (tmp_path / "devices.json").touch()
    assert not plan_devices(config(2, trainer={"ranks": 3}), nodes(), tmp_path).costs.measured


@pytest.mark.parametrize("has_tables", [False, True])
def test_a_run_that_was_killed_before_its_first_event_can_be_resumed(tmp_path: Path, has_tables: bool) -> None:
    plan = plan_devices(config(2, trainer={"ranks": 3}), nodes())
    leave_split(tmp_path, plan)
    (tmp_path / "journal.sqlite").touch()
    if has_tables:
        asyncio.run(SqliteJournal(tmp_path / "journal.sqlite").close())
    assert plan_devices(config(2, trainer={"ranks": 3}), nodes(), tmp_path) == plan


def test_shared_gpus_are_reserved_in_part() -> None:
    made = config(1, trainer={"ranks": 1, "gpu_share": 0.5})
    pool = made.pools["H800"].model_copy(update={"gpu_share": 0.5})
    shared = made.model_copy(update={"pools": {"H800": pool}})
    assert {spec.needs.gpus for spec in worker_specs(shared, None, None) if spec.role is not Role.ENVIRONMENT} >= {0.5}
    plan = plan_devices(shared, nodes(gpus=1))
    assert plan.split.fits
    assert {memory.limit for memory in plan.memory} == {40_000_000_000}
    with pytest.raises(ConfigError, match=r"pools\.big\.gpu_share.*set ranks = 1"):
        check(RunConfig, {"tasks": {"a": {}}, "pools": {"big": {"ranks": 2, "gpu_share": 0.5}}})


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        ({"min": 3, "max": 2}, "min .3. is above max .2."),
        ({"min": 1, "max": 2, "start": 3}, "start .3. is not between"),
        ({"min": 0, "max": 2}, "engines.min = 1 at least"),
        ("many", "engines"),
    ],
)
def test_impossible_ranges_are_refused(engines: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(RunConfig, {"tasks": {"a": {}}, "pools": {"p": {"engines": engines}}})
