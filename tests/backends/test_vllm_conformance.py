"""The vLLM engine keeps the promises of the engine port: with KV recomputed or kept, from both kinds of stores."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm` runs it in an environment of its own")

from vllm_parts import harness, model_folder, shared, spare_core

from rollart.backends.stores.memory import MemoryStore
from rollart.conformance.case import Case, NotApplicable
from rollart.conformance.engine import CASES, EngineHarness


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = model_folder(tmp_path_factory.mktemp("vllm") / "model")
    spare_core(folder)
    yield folder
    spare_core(folder).really_close()


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(case: Case[EngineHarness, None], kv_on_update: str, folder: Path, tmp_path: Path) -> None:
    store = MemoryStore() if kv_on_update == "recompute" else shared(tmp_path)
    try:
        case.run(harness(folder, store, kv_on_update=kv_on_update))
    except NotApplicable as reason:
        pytest.skip(str(reason))
