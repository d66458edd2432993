"""LoRA in the torch trainer: PEFT's function, PEFT's files, and versions that engines merge."""

import json

import pytest
import torch
from packed_parts import samples
from parts import V1, V2, V3, Driver, tiny_model
from safetensors.torch import load_file
from test_torch_trainer import SETTINGS, poisoned, train
from torch_engine_parts import PROMPT, add, check_logprobs, engine

from rollart.backends.engines.staging import Staging
from rollart.backends.stores.adapters import merge_now
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.tensors import unpack
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.types.errors import RequestError
from rollart.types.messages import Publish, Published, Save, Saved, Stage, Staged, Trained, Update, Updated
from rollart.types.versions import Version
from rollart.types.weights import WeightKind

peft = pytest.importorskip("peft", reason="LoRA needs peft: pip install 'rollart[lora]'")

LORA = {"rank": 4, "alpha": 8.0}
TOKENS = torch.tensor([[5, 9, 200, 31, 7, 7, 90]])
pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture
def trainer():
    built = []

    def build(store=None, lora=LORA, **settings):
        own = {**SETTINGS, "learning_rate": 1e-2, "store": store or MemoryStore(), "lora": lora, **settings}
        driver = Driver(TorchTrainer, own)
        built.append(driver)
        return driver

    yield build
    for driver in built:
        driver.worker.close()


def read(store, manifest):
    return unpack(manifest, [store.bucket(manifest.version, index) for index in range(len(manifest.digests))])


def served(store, manifest):
    """The weights that an engine makes of a version."""
    staging = Staging(store, tiny_model().state_dict())
    staging.begin(manifest)
    while (result := staging.slice()) is None:
        pass
    assert result == Staged(manifest.version)
    return staging.take(manifest.version)


def published(driver, version):
    (event,) = driver.call(Publish(version))
    assert isinstance(event, Published), event
    return event.manifest


def own_weights(driver):
    """What the trainer computes with, as PEFT merges it."""
    base = driver.worker._adapter.base()
    return merge_now({name: tensor.detach() for name, tensor in base.items()}, driver.worker._adapter.factors())


def logits(tensors):
    model = tiny_model()
    model.load_state_dict(tensors)
    with torch.no_grad():
        return model(TOKENS).logits


def distance(left, right):
    assert left.keys() == right.keys()
    return max((left[name].float() - right[name].float()).abs().max().item() for name in left)


def test_only_the_factors_are_trained(trainer):
    driver = trainer()
    model = driver.worker._model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for step in (1, 2):
        assert isinstance(train(driver, step), Trained)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert len(moved) == 2 * 7 * 2  # A and B of seven linear layers in two layers, and not of the head
    assert len(driver.worker._optimizer.state) == len(moved)


def test_the_first_step_is_that_of_the_model_itself(trainer):
    """B is zero, so the loss is; what PEFT computes with afterwards is what is published."""
    plain, driver = trainer(lora=None), trainer()
    assert train(driver, 1).metrics["loss"] == train(plain, 1).metrics["loss"]
    train(driver, 2)
    with torch.no_grad():
        driver.model = driver.worker._model
        driver.model.set_attn_implementation("sdpa")
        through_peft = driver.model(TOKENS).logits
    torch.testing.assert_close(logits(own_weights(driver)), through_peft, rtol=0, atol=1e-4)


def test_later_versions_are_adapters_on_the_first(trainer):
    store = MemoryStore()
    driver = trainer(store)
    first = published(driver, Version(0, 0))
    assert (first.kind, first.parent) == (WeightKind.FULL, None)
    assert distance(read(store, first), dict(tiny_model().state_dict())) == 0.0
    for step in (1, 2, 3):
        train(driver, step)
        manifest = published(driver, Version(0, step))
        assert (manifest.kind, manifest.parent) == (WeightKind.ADAPTER, Version(0, 0))
        assert manifest.total_bytes < first.total_bytes / 3
        assert distance(served(store, manifest), own_weights(driver)) <= 1e-6
    assert sorted(store._versions) == [Version(0, 0), V2, V3]


def test_merged_versions_are_what_an_engine_makes_of_adapters(trainer):
    left, right = MemoryStore(), MemoryStore()
    adapters, merged = trainer(left), trainer(right, lora=LORA | {"publish": "merged"})
    for driver in (adapters, merged):
        published(driver, Version(0, 0))
        train(driver, 1)
    manifest = published(merged, V1)
    assert (manifest.kind, manifest.parent) == (WeightKind.FULL, Version(0, 0))
    assert distance(read(right, manifest), served(left, published(adapters, V1))) == 0.0


def test_bfloat16_factors_are_published_in_float32(trainer):
    store = MemoryStore()
    driver = trainer(store, dtype="bfloat16")
    first = published(driver, Version(0, 0))
    assert {entry.dtype for entry in first.tensors} == {"bfloat16"}
    train(driver, 1)
    manifest = published(driver, V1)
    assert {entry.dtype for entry in manifest.tensors} == {"float32"}
    assert served(store, manifest)["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16


def test_a_checkpoint_is_one_of_peft(trainer, tmp_path):
    model = tmp_path / "model"
    tiny_model(3).save_pretrained(model)
    driver = trainer(model=str(model), checkpoints=str(tmp_path / "run"))
    for step in (1, 2):
        train(driver, step)
    assert driver.call(Save(V2)) == [Saved(V2)]
    (folder,) = (tmp_path / "run").iterdir()
    assert "model.safetensors" not in {path.name for path in folder.iterdir()}
    loaded = peft.PeftModel.from_pretrained(tiny_model(3), folder)
    with torch.no_grad():
        expected = logits(own_weights(driver))
        torch.testing.assert_close(loaded(TOKENS).logits, expected, rtol=0, atol=1e-4)
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=0, atol=1e-4)
    described = json.loads((folder / "adapter_config.json").read_text())
    assert (described["r"], described["base_model_name_or_path"]) == (4, str(model))
    moments = load_file(folder / "optimizer.safetensors")
    assert all(".lora_" in name for name in moments)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1)])
def test_training_goes_on(trainer, before, after, tmp_path):
    store = MemoryStore()
    unstopped = trainer(store, checkpoints=str(tmp_path), ranks=before)
    published(unstopped, Version(0, 0))
    for step in (1, 2):
        train(unstopped, step)
    assert unstopped.call(Save(V2)) == [Saved(V2)]
    expected = train(unstopped, 3)
    kept = own_whole(unstopped)
    unstopped.worker.close()
    later = trainer(store, checkpoints=str(tmp_path), ranks=after)
    assert later.worker.info().restored == V2
    # After a restart the first version is full again, with the factors in it, and the next ones are on that.
    first = published(later, Version(1, 2))
    assert first.kind is WeightKind.FULL
    assert distance(read(store, first), own_whole(later)) == 0.0
    found = train(later, 3)
    if before == after:
        assert found == expected
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-4)
    assert distance(kept, own_whole(later)) <= 1e-4
    manifest = published(later, Version(1, 3))
    assert (manifest.kind, manifest.parent) == (WeightKind.ADAPTER, Version(1, 2))
    assert distance(served(store, manifest), own_whole(later)) <= 1e-5


def own_whole(driver):
    """All weights with the factors in them, of however many ranks."""
    worker = driver.worker
    first = worker._adapter._first
    tensors = worker._together(worker._snapshot_everywhere, WeightKind.FULL)
    worker._adapter._first = first  # adapters stay on what was published
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_ranks_train_the_same_factors(trainer):
    left, right = MemoryStore(), MemoryStore()
    one, two = trainer(left), trainer(right, ranks=2, gradient_checkpointing=True)
    assert published(two, Version(0, 0)).digests == published(one, Version(0, 0)).digests
    for step, batch in enumerate((samples(1), samples(2)[4:5], poisoned(), samples(3)), 1):
        alone, together = train(one, step, batch), train(two, step, batch)
        assert together.metrics["skipped_now"] == alone.metrics["skipped_now"] == (step == 3)
        for name in ("loss", "grad_norm", "mismatch"):
            if name in alone.metrics:
                assert together.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-4, abs=1e-4)
        ours, theirs = published(one, Version(0, step)), published(two, Version(0, step))
        assert theirs.kind is WeightKind.ADAPTER
        assert distance(served(left, ours), served(right, theirs)) <= 1e-4


def test_a_kl_penalty_holds_to_the_model_without_factors(trainer):
    driver = trainer(lora=LORA, loss={"kl_weight": 0.1})
    assert train(driver, 1).metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert train(driver, 2).metrics["kl"] > 1e-5


def test_another_model_is_refused(trainer, tmp_path):
    driver = trainer(checkpoints=str(tmp_path))
    train(driver, 1)
    driver.call(Save(V1))
    with pytest.raises(RequestError, match="adapter on a different model"):
        trainer(checkpoints=str(tmp_path), seed=1)
    with pytest.raises(RequestError, match="does not fit this model"):
        trainer(checkpoints=str(tmp_path), lora=LORA | {"rank": 8})
    with pytest.raises(RequestError, match=r"no model\.safetensors"):
        trainer(checkpoints=str(tmp_path), lora=None)


@pytest.mark.parametrize(
    ("targets", "message"),
    [(("nothing",), "not found"), (("lm_head",), "before the output head"), (("embed_tokens",), "only linear")],
)
def test_wrong_targets_are_named(trainer, targets, message):
    with pytest.raises(RequestError, match=message):
        trainer(lora=LORA | {"target_modules": targets})


def test_some_targets_only(trainer):
    driver = trainer(lora=LORA | {"target_modules": ("q_proj", "v_proj")})
    assert len(driver.worker._adapter.factors()) == 2 * 2 * 2
    assert isinstance(train(driver), Trained)


def test_an_engine_serves_the_logits_of_the_merged_model(trainer):
    store = MemoryStore()
    driver, serving = trainer(store), engine(store)
    first = published(driver, Version(0, 0))
    serving.ask(Stage(first))
    serving.ask(Update(first.version))
    for step in (1, 2):
        train(driver, step)
        version = Version(0, step)
        assert serving.ask(Stage(published(driver, version))) == [Staged(version)]
        assert serving.ask(Update(version)) == [Updated(version)]
        (done,) = serving.ask(add(step))
        merged = tiny_model()
        merged.load_state_dict(own_weights(driver))
        check_logprobs(merged, PROMPT.ids(), done.generated)
        with pytest.raises(AssertionError):  # and not those of the model without its adapter
            check_logprobs(tiny_model(), PROMPT.ids(), done.generated)
