"""Adapter versions: engines merge them into their base version, or report that they cannot."""

import sys

import pytest
import torch
from parts import TINY, V1, V2, V3, Driver, publish, tiny_model

from rollart.backends.engines.staging import Staging
from rollart.backends.engines.torch_engine import TorchEngine
from rollart.backends.stores.adapters import merge_now
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.tensors import pack
from rollart.backends.trainers.publishing import Publisher, WholeDraft
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.config.training import LoraSettings, TrainerSettings
from rollart.types.errors import RequestError, WeightError
from rollart.types.messages import Published, Stage, Staged, StageFailed, TrainerFailed, Update, Updated
from rollart.types.versions import Version
from rollart.types.weights import WeightKind

MODULE = "model.layers.1.mlp.up_proj"


def factors(seed=0, rank=3):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{MODULE}.lora_A.weight": torch.randn(rank, 32, generator=generator),
        f"{MODULE}.lora_B.weight": torch.randn(64, rank, generator=generator),
    }


def publish_adapter(store, version, tensors, parent=V1):
    manifest, buckets = pack(tensors, version=version, parent=parent, bucket_bytes=512, kind=WeightKind.ADAPTER)
    store.publish(manifest, buckets)
    return manifest


def staged(staging, manifest):
    staging.begin(manifest)
    while (result := staging.slice()) is None:
        pass
    return result


def test_what_is_merged_is_the_sum_and_the_base_stays():
    base, own = tiny_model().state_dict(), factors()
    before = base[f"{MODULE}.weight"].clone()
    out = merge_now(base, own)
    expected = before + own[f"{MODULE}.lora_B.weight"] @ own[f"{MODULE}.lora_A.weight"]
    torch.testing.assert_close(out[f"{MODULE}.weight"], expected)
    assert torch.equal(base[f"{MODULE}.weight"], before)
    assert [name for name in base if out[name] is not base[name]] == [f"{MODULE}.weight"]


def test_a_sum_is_rounded_once():
    base = {"m.weight": torch.ones(1, 1, dtype=torch.bfloat16)}
    small = {"m.lora_A.weight": torch.full((1, 1), 0.0625), "m.lora_B.weight": torch.full((1, 1), 0.0626)}
    (out,) = merge_now(base, small).values()
    assert out.dtype == torch.bfloat16
    assert out.item() == torch.tensor(1 + 0.0625 * 0.0626).bfloat16().item() != 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {f"{MODULE}.lora_A.weight": torch.ones(3, 32)},
        {"model.nowhere.lora_A.weight": torch.ones(3, 32), "model.nowhere.lora_B.weight": torch.ones(64, 3)},
        {f"{MODULE}.lora_A.weight": torch.ones(3, 31), f"{MODULE}.lora_B.weight": torch.ones(64, 3)},
        {f"{MODULE}.lora_A.weight": torch.ones(3, 32), f"{MODULE}.lora_B.weight": torch.ones(64, 2)},
        {f"{MODULE}.weight": torch.ones(64, 32)},
    ],
)
def test_what_does_not_fit_is_refused(wrong):
    with pytest.raises(WeightError, match=r"two factors|does not fit"):
        merge_now(tiny_model().state_dict(), wrong)


class Counting(MemoryStore):
    def __init__(self):
        super().__init__()
        self.read = []

    def bucket(self, version, index):
        self.read.append(version)
        return super().bucket(version, index)


def test_the_base_is_fetched_with_the_first_adapter_only():
    store = Counting()
    publish(store, V1, seed=5)
    staging = Staging(store, tiny_model().state_dict())
    for version, seed in ((V2, 1), (V3, 2)):
        assert staged(staging, publish_adapter(store, version, factors(seed))) == Staged(version)
        expected = merge_now(tiny_model(5).state_dict(), factors(seed))
        taken = staging.take(version)
        assert all(torch.equal(taken[name], expected[name]) for name in expected)
        assert (V1 in store.read) == (version == V2)
        store.read.clear()
    # Another base is another model: nothing of the first is left.
    later = Version(1, 0)
    publish(store, later, seed=6)
    assert staged(staging, publish_adapter(store, Version(1, 1), factors(3), parent=later)) == Staged(Version(1, 1))
    expected = merge_now(tiny_model(6).state_dict(), factors(3))
    assert torch.equal(staging.take(Version(1, 1))[f"{MODULE}.weight"], expected[f"{MODULE}.weight"])


def test_an_adapter_on_nothing_fails_alone():
    store = MemoryStore()
    staging = Staging(store, tiny_model().state_dict())
    publish(store, V1)
    manifest = publish_adapter(store, V2, factors())
    del store._versions[V1]  # no store does this; a damaged one may
    failed = staged(staging, manifest)
    assert isinstance(failed, StageFailed)
    assert str(V1) in failed.reason
    assert "on no version" in staged(staging, publish_adapter(store, V3, factors(), parent=None)).reason


def test_an_engine_that_takes_no_adapters_says_so():
    store = MemoryStore()
    publish(store, V1)
    staging = Staging(store, tiny_model().state_dict(), adapters=False)
    failed = staged(staging, publish_adapter(store, V2, factors()))
    assert isinstance(failed, StageFailed)
    assert "adapter" in failed.reason
    assert "merged" in failed.reason


def test_a_broken_adapter_costs_the_engine_nothing():
    store = MemoryStore()
    driver = Driver(TorchEngine, {"model": TINY, "store": store, "max_context": 64})
    assert driver.ask(Stage(publish(store, V1)), Update(V1))[-1] is not None
    broken = {name: tensor * torch.inf for name, tensor in factors().items()}
    events = driver.ask(Stage(publish_adapter(store, V2, broken)))
    assert isinstance(events[-1], StageFailed)
    assert "non-finite" in events[-1].reason
    events = driver.ask(Stage(publish_adapter(store, V3, factors())))
    assert events == [Staged(V3)]
    assert driver.ask(Update(V3)) == [Updated(V3)]


def drafting(tensors):
    return lambda version, parent, kind: WholeDraft(version, parent, kind, tensors, 8192)


def test_the_version_that_adapters_are_on_is_kept():
    store = MemoryStore()
    publisher = Publisher(store, keep=1)
    versions = [Version(0, step) for step in range(6)]
    kinds = [WeightKind.FULL, WeightKind.ADAPTER, WeightKind.ADAPTER, WeightKind.FULL, WeightKind.FULL]
    kept = []
    for version, kind in zip(versions, kinds, strict=False):
        tensors = tiny_model().state_dict() if kind is WeightKind.FULL else factors()
        result = publisher.start(version, drafting(tensors), kind).result()
        assert isinstance(result, Published)
        kept.append(sorted(held.step for held in store._versions))
    assert kept == [[0], [0, 1], [0, 2], [3], [4]]


def test_a_store_that_loses_the_base_is_named():
    publisher = Publisher(MemoryStore(), keep=2)
    publisher._published.append(publish(MemoryStore(), V1))
    result = publisher.start(V2, drafting(factors()), WeightKind.ADAPTER).result()
    assert isinstance(result, TrainerFailed)
    assert f"on {V1}, which the store does not hold" in result.reason


def test_without_peft_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    own = TrainerSettings(lora=LoraSettings())
    with pytest.raises(RequestError, match=r"pip install 'rollart\[lora\]'"):
        TorchTrainer({"model": TINY, "store": MemoryStore(), "trainer": own}, lambda: None)
