"""The reference trainer and its checkpoints: it goes on as if it had never stopped."""

import json
import math
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_parts import V1, V2, V3, die, names
from parts import TINY, VOCABULARY, Driver
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rollart
from rollart.backends.models import build_model
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.trainers.checkpoint import STATE, _State, write_file
from rollart.backends.trainers.reference import ReferenceTrainer
from rollart.types.errors import RequestError
from rollart.types.messages import Publish, Published, Save, Saved, SaveFailed, Train, Trained
from rollart.types.tokens import LOGPROB, TOKEN, Generated, Segment, TokenSequence, VersionRun
from rollart.types.trajectory import TrainSample
from rollart.types.versions import Version
from rollart.types.weights import bucket_digest

HERE = Path(__file__).parent
SOURCES = Path(rollart.__file__).parents[1]


def batch(number, advantages=(1.0, -1.0, 0.5)):
    samples = []
    for member, advantage in enumerate(advantages):
        ids = (np.arange(12, dtype=TOKEN) * (member + 3) + 7 * number) % 256
        log = TokenSequence()
        log.append_context(Segment.of(ids[:6]))
        logprobs = np.full(6, -math.log(VOCABULARY), dtype=LOGPROB).tobytes()
        log.append_sampled(Generated(Segment.of(ids[6:]), logprobs, (VersionRun(Version(0, 0), 6),)))
        samples.append(TrainSample(10 * number + member, number, "t", (log,), advantage, 0.0))
    return tuple(samples)


def trainer(root=None, **settings):
    own = {"model": TINY, "learning_rate": 1e-3, "weight_decay": 0.01, "bucket_bytes": 16384, "store": MemoryStore()}
    driver = Driver(ReferenceTrainer, {**own, "checkpoints": None if root is None else str(root), **settings})
    driver.model, driver.optimizer = driver.worker._model, driver.worker._optimizer
    return driver


def train(driver, step, *, epoch=0, **options):
    (done,) = driver.ask(Train(1000 * epoch + step, Version(epoch, step), batch(step, **options)))
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
    assert driver.ask(Save(version)) == [Saved(version)]


def restored(driver):
    return driver.worker.info().restored


def test_training_goes_on_bit_by_bit(tmp_path):
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


def test_the_generators_are_restored(tmp_path):
    driver = trainer(tmp_path)
    train(driver, 1)
    torch.manual_seed(7)
    saved(driver, V1)
    expected = torch.rand(4)
    torch.manual_seed(8)
    trainer(tmp_path)
    assert torch.equal(torch.rand(4), expected)


def test_a_restored_trainer_publishes_the_checkpoint_in_a_later_epoch(tmp_path):
    store = MemoryStore()
    first = trainer(tmp_path, store=store)
    train(first, 1)
    (before,) = first.ask(Publish(V1))
    saved(first, V1)
    train(first, 2)
    first.ask(Publish(V2))
    second = trainer(tmp_path, store=store)
    (after,) = second.ask(Publish(Version(1, 1)))
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


def test_a_trainer_without_a_folder_saves_nothing():
    driver = trainer()
    train(driver, 1)
    (failed,) = driver.ask(Save(V1))
    assert isinstance(failed, SaveFailed)
    assert failed.version == V1
    assert "set `checkpoints`" in failed.reason
    assert restored(driver) is None


def test_weights_without_a_version_are_not_saved(tmp_path):
    driver = trainer(tmp_path)
    (failed,) = driver.ask(Save(V1))
    assert isinstance(failed, SaveFailed)
    driver.ask(Publish(Version(0, 0)))
    saved(driver, Version(0, 0))
    fresh = trainer()
    assert same(weights(trainer(tmp_path, seed=5)), weights(fresh))


def test_a_full_disk_is_an_answer_and_the_trainer_goes_on(tmp_path):
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
    (failed,) = driver.ask(Save(V2))
    assert isinstance(failed, SaveFailed)
    assert "No space left on device" in failed.reason
    assert restored(trainer(tmp_path)) == V1
    driver.worker._checkpoints._write = write_file
    saved(driver, V2)  # asked again when there is room
    train(driver, 3)
    assert restored(trainer(tmp_path)) == V2


def test_old_checkpoints_go(tmp_path):
    driver = trainer(tmp_path, keep_checkpoints=1)
    for step in (1, 2):
        train(driver, step)
        saved(driver, Version(0, step))
    assert names(tmp_path) == ["step-00000002.epoch-0"]


def test_the_folder_is_a_model_that_transformers_loads(tmp_path):
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
    assert state["facts"]["optimizer"]["lr"] == 1e-3
    assert set(state["files"]) == {"config.json", "model.safetensors", "optimizer.safetensors", "random.safetensors"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_model_comes_back(tmp_path, dtype, tied):
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
    assert loaded.dtype == getattr(torch, dtype)
    assert same(loaded.state_dict(), weights(driver))


def test_settings_win_over_what_was_saved(tmp_path):
    driver = trainer(tmp_path)
    train(driver, 1)
    saved(driver, V1)
    later = trainer(tmp_path, learning_rate=5e-4)
    assert later.optimizer.param_groups[0]["lr"] == 5e-4
    assert same(moments(later), moments(driver))


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    driver = trainer(tmp_path)
    train(driver, 1)
    saved(driver, V1)
    other = {"config": TINY["config"] | {"num_hidden_layers": 1}}
    with pytest.raises(RequestError, match="not of this model"):
        trainer(tmp_path, model=other)


class Payload:
    """What a pickle would run."""

    def __reduce__(self):
        return (os.mkdir, (os.environ["PICKLE_RAN"],))


def test_a_pickle_is_never_run(tmp_path, monkeypatch):
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
        digests = {file: bucket_digest((folder / file).read_bytes()) for file in files}
        (folder / STATE).write_bytes(_State(version=V1, files=digests, facts={"skipped": 0}).sealed())
        with pytest.raises(RequestError, match="not safetensors"):
            trainer(root)
        (folder / name).write_bytes(files[name])
    assert not ran.exists()
    pickle.loads(payload)
    assert ran.exists(), "the payload works, had anybody run it"


def test_optimiser_state_of_unknown_parameters_is_refused(tmp_path):
    driver = trainer(tmp_path)
    train(driver, 1)
    saved(driver, V1)
    folder = tmp_path / "step-00000001.epoch-0"
    save_file({"nobody.weight/exp_avg": torch.zeros(2)}, folder / "optimizer.safetensors")
    files = json.loads((folder / STATE).read_text())["files"]
    digests = {name: bucket_digest((folder / name).read_bytes()) for name in files}
    (folder / STATE).write_bytes(_State(version=V1, files=digests, facts={"skipped": 0}).sealed())
    with pytest.raises(RequestError, match=r"nobody\.weight"):
        trainer(tmp_path)


def train_and_die(root):
    """In a process of its own: v0.1 is saved, v0.2 is cut."""

    def write(path, data):
        if path.name == "optimizer.safetensors" and V2.step == driver.worker._version.step:
            write_file(path, data[: len(data) // 2])
            die()
        write_file(path, data)

    driver = trainer(root)
    driver.worker._checkpoints._write = write
    for step in (1, 2):
        train(driver, step)
        saved(driver, Version(0, step))


def test_a_trainer_killed_while_it_saves(tmp_path):
    script = f"import test_trainer_checkpoint as test\ntest.train_and_die({str(tmp_path)!r})"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": f"{SOURCES}{os.pathsep}{HERE}"},
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert names(tmp_path) == [".step-00000002.epoch-0.tmp", "step-00000001.epoch-0"]
    unstopped, later = trainer(), trainer(tmp_path)
    assert restored(later) == V1
    train(unstopped, 1)
    assert train(later, 2, epoch=1) == train(unstopped, 2, epoch=1)
    assert same(weights(later), weights(unstopped))
    saved(later, Version(1, 2))
    assert names(tmp_path) == ["step-00000001.epoch-0", "step-00000002.epoch-1"]
