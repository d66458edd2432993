"""LoRA in whole runs, with adapters as what is published: on both runtimes, for more versions than a store has room."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from real_cli import small_task
from tiny_work import MODEL_CONFIG

from rollart.app.compose import process_store, real_parts
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.trainers.checkpoint import Checkpoints
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.control.pipeline import run_pipeline
from rollart.distributed.inline import InlineRuntime
from rollart.observe.audit import audit
from rollart.observe.journal import MemoryJournal
from rollart.ports.runtime import Runtime
from rollart.ports.weights import WeightStore
from rollart.types.journal import StepTrained
from rollart.types.versions import Version
from rollart.types.weights import WeightKind

pytest.importorskip("peft", reason="PEFT is not installed: pip install 'rollart[lora]'")

pytestmark = pytest.mark.timeout(300)
STEPS = 12


def config_of(folder: Path) -> RunConfig:
    return check(
        RunConfig,
        {
            "steps": STEPS,
            "batch": {"trajectories": 8, "group_size": 4},
            "checkpoint_every": STEPS,
            "tasks": {
                "maze": {
                    "environment": f"{folder / 'maze.py'}:Maze",
                    "environments": 8,
                    "max_turns": 3,
                    "max_turn_tokens": 4,
                    "max_context": 200,
                }
            },
            "pools": {"local": {}},
            "trainer": {"learning_rate": 1e-2, "lora": {"rank": 2, "publish": "adapter"}},
            "model": {"config": MODEL_CONFIG | {"vocab_size": 260, "max_position_embeddings": 256}},
        },
    )


@contextmanager
def hosts(kind: str, config: RunConfig, folder: Path) -> Iterator[tuple[Runtime, WeightStore]]:
    if kind == "inline":
        yield InlineRuntime(), MemoryStore()
    else:
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
        from rollart.distributed.ray_local import LocalRay
        from rollart.distributed.ray_runtime import RayRuntime

        with process_store(config, folder) as store, LocalRay():
            yield RayRuntime(folder / "logs"), store


def published(store: WeightStore, version: Version) -> Mapping[str, Any]:
    """The weights that an engine makes of an adapter version."""
    from rollart.backends.stores.adapters import merge_now
    from rollart.backends.stores.tensors import unpack

    manifest = store.manifest(version)
    assert manifest.kind is WeightKind.ADAPTER
    assert manifest.parent is not None
    adapter, base = (
        unpack(each, [store.bucket(each.version, index) for index in range(len(each.digests))])
        for each in (manifest, store.manifest(manifest.parent))
    )
    return merge_now(base, adapter)


@pytest.mark.parametrize("kind", ["inline", "ray"])
def test_twelve_steps_of_lora_and_peft_loads_what_was_trained(kind: str, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel

    from rollart.backends.models import build_model

    small_task(tmp_path)
    config, journal = config_of(tmp_path), MemoryJournal()
    assert isinstance(config.model, dict)
    with hosts(kind, config, tmp_path) as (runtime, store):

        async def main() -> None:
            await run_pipeline(config, real_parts(config, runtime, journal, store, tmp_path / "checkpoints"))

        asyncio.run(main())
        weights = published(store, Version(0, STEPS))
    assert not audit(journal.events)
    assert sum(isinstance(event, StepTrained) for event in journal.events) == STEPS

    checkpoint = Checkpoints(tmp_path / "checkpoints").newest()
    assert checkpoint is not None
    assert checkpoint.version == Version(0, STEPS)

    def fresh() -> Any:
        return build_model(config.model, dtype="float32", device="cpu", seed=config.seed)

    tokens = torch.arange(1, 41)[None]
    with torch.no_grad():
        before = fresh()(tokens).logits
        trainer = fresh()
        trainer.load_state_dict(weights)
        after = trainer(tokens).logits
        loaded = PeftModel.from_pretrained(fresh(), checkpoint.folder).eval()(tokens).logits
    torch.testing.assert_close(loaded, after, atol=1e-4, rtol=1e-4)
    assert (after - before).abs().max() > 0.05, "training changed the model"
