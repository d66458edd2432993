"""Trainers and their checkpoints: they go on as if they had never stopped."""

import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_parts import V1, V2, V3, die, names
from parts import TINY, VOCABULARY, Driver, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rollart
from rollart.backends.models import build_model
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.trainers.checkpoint import STATE, _State, write_file
from rollart.backends.trainers.reference import ReferenceTrainer
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.types.digests import bulk_digest
from rollart.types.errors import RequestError
from rollart.types.messages import Publish, Published, Save, Saved, SaveFailed, Train, Trained
from rollart.types.tokens import LOGPROB, TOKEN, Generated, Segment, TokenSequence, VersionRun
from rollart.types.trajectory import TrainSample, Turn
from rollart.types.versions import Version

HERE = Path(__file__).parent
SOURCES = Path(rollart.__file__).parents[1]
KINDS = {"reference": ReferenceTrainer, "torch": TorchTrainer}


@pytest.fixture(params=KINDS)
def trainer(request):
    """Builds trainers of one kind."""
    return partial(build, KINDS[request.param])


def batch(number, advantages=(1.0, -1.0, 0.5)):
    samples = []
    for member, advantage in enumerate(advantages):
        ids = (np.arange(12, dtype=TOKEN) * (member + 3) + 7 * number) % 256
        log = TokenSequence()
        log.append_context(Segment.of(ids[:6]))
        logprobs = np.full(6, -math.log(VOCABULARY), dtype=LOGPROB).tobytes()
        log.append_sampled(Generated(Segment.of(ids[6:]), logprobs, (VersionRun(Version(0, 0), 6),)))
        samples.append(TrainSample(10 * number + member, number, "t", (log,), (Turn(log.sampled, advantage),), 0.0))
    return tuple(samples)


def build(kind, root=None, **settings):
    own = {"model": TINY, "learning_rate": 1e-3, "weight_decay": 0.01, "bucket_bytes": 16384, "store": MemoryStore()}
    if kind is TorchTrainer:
        own |= {"token_budget": 30, "schedule": {"warmup_steps": 3}, "max_skipped": 1}
    driver = Driver(kind, {**own, "checkpoints": None if root is None else str(root), **settings})
    driver.model, driver.optimizer = driver.worker._model, driver.worker._optimizer
    return driver


def train(driver, step, *, epoch=0, **options):
    (done,) = driver.call(Train(1000 * epoch + step, Version(epoch, step), batch(step, **options)))
    return done


def weights(driver):
    return {name: tensor.clone() for name, tensor in driver.model.state_dict().items()}


def moments(driver):
    parameters = dict(driver.model.named_parameters())
    state = driver.optimizer.state
    return {f"{name}/{field}": value for name, each in parameters.items() for field, value in state[each].items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def saved(driver, version):
    assert driver.call(Save(version)) == [Saved(version)]


def restored(driver):
    return driver.worker.info().restored


def test_training_goes_on_bit_by_bit(trainer, tmp_path):
    stopped, unstopped = trainer(tmp_path), trainer()
    for step in (1, 2, 3):
        assert train(stopped, step) == train(unstopped, step)
    assert "not finite" in train(stopped, 4, advantages=(math.nan,)).reason
    assert "not finite" in train(unstopped, 4, advantages=(math.nan,)).reason
    saved(stopped, V3)
    stopped.worker.close()

    later = trainer(tmp_path, seed=99)  # the seed of initial weights, which it does not need
    assert restored(later) == V3
    for step in (4, 5):
        left, right = train(later, step, epoch=1), train(unstopped, step, epoch=1)
        assert isinstance(left, Trained)
        assert left == right  # the losses, to the last bit
        assert left.metrics["skipped"] == 1
    assert same(weights(later), weights(unstopped))
    assert same(moments(later), moments(unstopped))


def test_the_generators_are_restored(trainer, tmp_path):
    driver = trainer(tmp_path)
    train(driver, 1)
    torch.manual_seed(7)
    saved(driver, V1)
    expected = torch.rand(4)
    torch.manual_seed(8)
    trainer(tmp_path)
    assert torch.equal(torch.rand(4), expected)


def test_a_restored_trainer_publishes_the_checkpoint_in_a_later_epoch(trainer, tmp_path):
    store = MemoryStore()
    first = trainer(tmp_path, store=store)
    train(first, 1)
    (before,) = first.call(Publish(V1))
    saved(first, V1)
    train(first, 2)
    first.call(Publish(V2))
    second = trainer(tmp_path, store=store)
    (after,) = second.call(Publish(Version(1, 1)))
    assert isinstance(after, Published)
    assert after.manifest.digests == before.manifest.digests
    assert store.newest() == Version(1, 1)
    # Under its new name it can be saved again, and the next step is newer than that.
    saved(second, Version(1, 1))
    train(second, 2, epoch=1)
    saved(second, Version(1, 2))
    assert names(tmp_path) == ["step-00000001.epoch-1", "step-00000002.epoch-1"]
    assert restored(trainer(tmp_path)) == Version(1, 2)
    assert "not newer" in train(trainer(tmp_path), 1, epoch=1).reason


def test_a_trainer_without_a_folder_saves_nothing(trainer):
    driver = trainer()
    train(driver, 1)
    (failed,) = driver.call(Save(V1))
    assert isinstance(failed, SaveFailed)
    assert failed.version == V1
    assert "set `checkpoints`" in failed.reason
    assert restored(driver) is None


def test_weights_without_a_version_are_not_saved(trainer, tmp_path):
    driver = trainer(tmp_path)
    (failed,) = driver.call(Save(V1))
    assert isinstance(failed, SaveFailed)
    driver.call(Publish(Version(0, 0)))
    saved(driver, Version(0, 0))
    fresh = trainer()
    assert same(weights(trainer(tmp_path, seed=5)), weights(fresh))


def test_a_full_disk_is_an_answer_and_the_trainer_goes_on(trainer, tmp_path):
    def write(path, data):
        if path.name == "optimizer.safetensors":
            with Path("/dev/full").open("wb") as full:
                full.write(data)
        write_file(path, data)

    driver = trainer(tmp_path)
    train(driver, 1)
    saved(driver, V1)
    train(driver, 2)
    driver.worker._checkpoints._write = write
    (failed,) = driver.call(Save(V2))
    assert isinstance(failed, SaveFailed)
    assert "No space left on device" in failed.reason
    assert restored(trainer(tmp_path)) == V1
    driver.worker._checkpoints._write = write_file
    saved(driver, V2)  # asked again when there is room
    train(driver, 3)
    assert restored(trainer(tmp_path)) == V2


def test_old_checkpoints_go(trainer, tmp_path):
    driver = trainer(tmp_path, keep_checkpoints=1)
    for step in (1, 2):
        train(driver, step)
        saved(driver, Version(0, step))
    assert names(tmp_path) == ["step-00000002.epoch-0"]


def test_the_folder_is_a_model_that_transformers_loads(trainer, tmp_path):
    driver = trainer(tmp_path)
    train(driver, 1)
    saved(driver, V1)
    folder = tmp_path / "step-00000001.epoch-0"
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.dtype == torch.float32
    assert same(model.state_dict(), weights(driver))
    assert same(build_model(str(folder), dtype="float32", device="cpu").state_dict(), weights(driver))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")  # tied, and there once
    state = json.loads((folder / STATE).read_text())
    assert state["version"] == [0, 1]
    assert state["facts"]["optimizer"]["lr"] == driver.optimizer.param_groups[0]["lr"]
    tensors = {"model.safetensors", "optimizer.safetensors", "random.safetensors"}
    assert set(state["files"]) == {"config.json", "generation_config.json"} | tensors


def test_a_model_keeps_its_tokenizer_and_its_generation_config(trainer, tmp_path):
    """The folder of a checkpoint can be loaded as a model, by a trainer too."""
    source = tmp_path / "source"
    tiny_model().save_pretrained(source)
    texts = {
        "tokenizer.json": "{}",
        "merges.txt": "a b",
        "chat_template.jinja": "{{ x }}",
        "notes.txt": "no part of it",
    }
    texts["generation_config.json"] = json.dumps({"top_k": 7})
    for name, text in texts.items():
        (source / name).write_text(text)
    driver = trainer(tmp_path / "checkpoints", model=str(source))
    shutil.rmtree(source)
    train(driver, 1)
    saved(driver, V1)
    folder = tmp_path / "checkpoints" / "step-00000001.epoch-0"
    assert not (folder / "notes.txt").exists()
    for name in texts.keys() - {"notes.txt"}:
        assert (folder / name).read_text() == texts[name]
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.top_k == 7
    again = trainer(model=str(folder))
    assert same(weights(again), weights(driver))
    damage = folder / "merges.txt"
    damage.write_text("a c")
    with pytest.raises(RequestError, match="none of the 1 checkpoints"):
        trainer(tmp_path / "checkpoints", model=str(folder))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_model_comes_back(trainer, tmp_path, dtype, tied):
    model = {"config": TINY["config"] | {"tie_word_embeddings": tied}}
    driver = trainer(tmp_path, model=model, dtype=dtype)
    train(driver, 1)
    saved(driver, V1)
    later = trainer(tmp_path, model=model, dtype=dtype, seed=9)
    assert same(weights(later), weights(driver))
    assert same(moments(later), moments(driver))
    assert (later.model.lm_head.weight is later.model.model.embed_tokens.weight) == tied
    folder = tmp_path / "step-00000001.epoch-0"
    loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert loaded.dtype == driver.model.dtype  # of the master weights
    assert same(loaded.state_dict(), weights(driver))


def test_settings_win_over_what_was_saved(trainer, tmp_path):
    driver = trainer(tmp_path)
    train(driver, 1)
    saved(driver, V1)
    later = trainer(tmp_path, learning_rate=5e-4)
    assert later.optimizer.param_groups[0]["lr"] == 5e-4
    assert same(moments(later), moments(driver))


def test_the_checkpoint_of_another_model_is_refused(trainer, tmp_path):
    driver = trainer(tmp_path)
    train(driver, 1)
    saved(driver, V1)
    other = {"config": TINY["config"] | {"num_hidden_layers": 1}}
    with pytest.raises(RequestError, match="does not fit this model"):
        trainer(tmp_path, model=other)


class Payload:
    """What a pickle would run."""

    def __reduce__(self):
        return (os.mkdir, (os.environ["PICKLE_RAN"],))


def test_a_pickle_is_never_run(trainer, tmp_path, monkeypatch):
    """Not beside the files, and not in their place with the right digest."""
    ran = tmp_path / "ran"
    monkeypatch.setenv("PICKLE_RAN", str(ran))
    root = tmp_path / "checkpoints"
    driver = trainer(root)
    train(driver, 1)
    saved(driver, V1)
    payload = pickle.dumps(Payload())
    folder = root / "step-00000001.epoch-0"
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "rng_state.pth"):
        (folder / name).write_bytes(payload)
    assert restored(trainer(root)) == V1
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".safetensors")}
    del files[STATE]
    for name in ("model.safetensors", "optimizer.safetensors", "random.safetensors"):
        (folder / name).write_bytes(payload)
        digests = {file: bulk_digest((folder / file).read_bytes()) for file in files}
        (folder / STATE).write_bytes(_State(version=V1, files=digests, facts={"skipped": 0}).sealed())
        with pytest.raises(RequestError, match="not safetensors"):
            trainer(root)
        (folder / name).write_bytes(files[name])
    assert not ran.exists()
    pickle.loads(payload)
    assert ran.exists(), "the payload works, had anybody run it"


def test_optimiser_state_of_unknown_parameters_is_refused(trainer, tmp_path):
    driver = trainer(tmp_path)
    train(driver, 1)
    saved(driver, V1)
    folder = tmp_path / "step-00000001.epoch-0"
    save_file({"unknown.weight/exp_avg": torch.zeros(2)}, folder / "optimizer.safetensors")
    files = json.loads((folder / STATE).read_text())["files"]
    digests = {name: bulk_digest((folder / name).read_bytes()) for name in files}
    (folder / STATE).write_bytes(_State(version=V1, files=digests, facts={"skipped": 0}).sealed())
    with pytest.raises(RequestError, match=r"unknown\.weight"):
        trainer(tmp_path)


class Killed(BaseException):
    """Nothing of a process that is killed handles it, so this is no `Exception`."""


def test_a_save_cut_in_any_of_its_files_leaves_the_one_before(trainer, tmp_path):
    def write(path, data):
        written.append(path.name)
        if len(written) == cut_at:
            write_file(path, data[: len(data) // 2])
            raise Killed
        write_file(path, data)

    unstopped = trainer()
    first, second = train(unstopped, 1), train(unstopped, 2)
    for cut_at in range(1, 100):
        root, written = tmp_path / str(cut_at), []
        driver = trainer(root)
        assert train(driver, 1) == first
        saved(driver, V1)
        train(driver, 2)
        driver.worker._checkpoints._write = write
        try:
            saved(driver, V2)
        except Killed:
            later = trainer(root)
            assert restored(later) == V1
            assert train(later, 2) == second
        else:
            assert restored(trainer(root)) == V2
            break
    assert written[-1] == STATE
    assert cut_at == len(written) + 1 == 7


def train_and_die(kind, root):
    """In a process of its own: v0.1 is saved, v0.2 is cut."""

    def write(path, data):
        if path.name == "optimizer.safetensors" and V2.step == driver.worker._version.step:
            write_file(path, data[: len(data) // 2])
            die()
        write_file(path, data)

    driver = build(KINDS[kind], root)
    driver.worker._checkpoints._write = write
    for step in (1, 2):
        train(driver, step)
        saved(driver, Version(0, step))


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_killed_while_it_saves(kind, tmp_path):
    script = f"import test_trainer_checkpoint as test\ntest.train_and_die({kind!r}, {str(tmp_path)!r})"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": f"{SOURCES}{os.pathsep}{HERE}{os.pathsep}{HERE.parent}"},
        timeout=250,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert names(tmp_path) == [".step-00000002.epoch-0.tmp", "step-00000001.epoch-0"]
    unstopped, later = build(KINDS[kind]), build(KINDS[kind], tmp_path)
    assert restored(later) == V1
    train(unstopped, 1)
    assert train(later, 2, epoch=1) == train(unstopped, 2, epoch=1)
    assert same(weights(later), weights(unstopped))
    saved(later, Version(1, 2))
    assert names(tmp_path) == ["step-00000001.epoch-0", "step-00000002.epoch-1"]
