"""Checkpoints that are kept on another machine than the trainer's. Machines here are temporary folders of their own."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from checkpoint_parts import ALTERING, V1, V2, V3, contents, die, names
from parts import Driver
from test_trainer_checkpoint import batch, build, train, weights

from rollart.backends.trainers.checkpoint import CheckpointPlace, NotSaved, folder_name
from rollart.backends.trainers.reference import ReferenceTrainer
from rollart.backends.trainers.remote_checkpoints import RemoteCheckpoints, held_at
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.distributed.folder_files import FolderFiles
from rollart.ports.folder_transfer import drafts, node_folder
from rollart.types.errors import FilesError, RequestError
from rollart.types.messages import Save, Saved, SaveFailed, Train
from rollart.types.versions import Version


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Moves this process to a machine with a temporary folder of its own."""

    def move(name):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))

    move("first")
    return move


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run" / "checkpoints"


def place_at(root, run="run-1"):
    return CheckpointPlace(FolderFiles(root), run)


def save(checkpoints, *versions):
    for version in versions:
        checkpoints.save(version, contents(version), {"at": str(version)})


def newest(root, **options):
    """The version that a trainer on this machine starts from; its files are those that were saved under it."""
    checkpoints = RemoteCheckpoints(place_at(root, **options))
    checkpoint = checkpoints.newest()
    if checkpoint is None:
        return None
    assert {name: checkpoint.file(name).read_bytes() for name in checkpoint.files} == dict(contents(checkpoint.version))
    checkpoints.close()
    return checkpoint.version


def scratch():
    return sorted(path.name for path in node_folder("checkpoints").iterdir() if not path.name.startswith("."))


def test_a_checkpoint_reaches_its_place_and_returns_to_another_machine(machine, root):
    assert newest(root) is None
    save(RemoteCheckpoints(place_at(root)), V1, V2)
    assert names(root) == [folder_name(V1), folder_name(V2)]
    machine("second")
    assert newest(root) == V2
    assert scratch() == []


def test_a_copy_that_is_here_is_used_only_if_it_is_the_same(root):
    save(RemoteCheckpoints(place_at(root)), V1)  # never closed: its process was killed
    here = node_folder("checkpoints") / "run-1" / folder_name(V1)
    before = here.stat().st_ino
    checkpoints = RemoteCheckpoints(place_at(root))
    assert checkpoints.newest().folder.stat().st_ino == before
    (here / "model.safetensors").write_bytes(b"damaged by hand")
    assert checkpoints.newest().version == V1
    assert (here / "model.safetensors").read_bytes() == dict(contents(V1))["model.safetensors"]


def test_as_many_are_kept_there_as_here(root):
    checkpoints = RemoteCheckpoints(place_at(root), keep=2)
    save(checkpoints, V1, V2, V3)
    assert names(root) == [folder_name(V2), folder_name(V3)]
    assert names(node_folder("checkpoints") / "run-1") == [folder_name(V2), folder_name(V3)]
    checkpoints.close()
    assert scratch() == []


def test_a_damaged_checkpoint_is_skipped_and_removed(machine, root, caplog):
    save(RemoteCheckpoints(place_at(root)), V1, V2)
    (root / folder_name(V2) / "model.safetensors").write_bytes(b"other")
    machine("second")
    checkpoints = RemoteCheckpoints(place_at(root))
    assert checkpoints.newest().version == V1
    assert "skipping damaged checkpoint" in caplog.text
    save(checkpoints, Version(1, 2))
    assert names(root) == [folder_name(V1), folder_name(Version(1, 2))]


def test_nothing_starts_from_scratch_if_all_are_damaged(root):
    save(RemoteCheckpoints(place_at(root)), V1)
    (root / folder_name(V1) / "state.json").write_bytes(b"{")
    with pytest.raises(RequestError, match="none of the 1 checkpoints"):
        RemoteCheckpoints(place_at(root)).newest()


class Full(FolderFiles):
    def write(self, draft, name, offset, piece, digest):
        if name == "optimizer.safetensors":
            raise FilesError("no space left on device")
        super().write(draft, name, offset, piece, digest)


def test_a_save_that_does_not_arrive_is_no_checkpoint(root):
    save(RemoteCheckpoints(place_at(root)), V1)
    checkpoints = RemoteCheckpoints(CheckpointPlace(Full(root), "run-1"))
    with pytest.raises(NotSaved, match="no space left"):
        save(checkpoints, V2)
    assert names(root) == [folder_name(V1)]
    assert names(node_folder("checkpoints") / "run-1") == [folder_name(V1)]
    save(RemoteCheckpoints(place_at(root)), V2)
    assert newest(root) == V2


def test_versions_only_grow(machine, root):
    save(RemoteCheckpoints(place_at(root)), V2)
    machine("second")
    with pytest.raises(NotSaved, match="versions only grow"):
        save(RemoteCheckpoints(place_at(root)), V1)


def test_scratch_of_another_run_is_removed_unless_it_is_used(root, tmp_path):
    used = RemoteCheckpoints(place_at(tmp_path / "other", run="used"))
    save(used, V1)
    left = node_folder("checkpoints") / "left"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"of a run that was killed")
    assert newest(root) is None
    assert scratch() == ["used"]
    used.close()
    assert scratch() == []


def test_a_kill_at_any_moment_of_a_save_leaves_a_checkpoint(machine, root, tmp_path):
    """A real SIGKILL before every call of the save that alters the disk, here or there."""
    seen = set()
    for number in range(1, 1000):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        machine(f"killed-{number}")
        first = RemoteCheckpoints(place_at(root))
        save(first, V1)
        first.close()
        child = os.fork()
        if not child:
            save_until(root, number)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        machine(f"second-{number}")
        found = newest(root)
        assert found in (V1, V2)
        seen.add(found)
        assert drafts(root) == []
        machine(f"killed-{number}")  # what is left there does not hold up a restart on the same machine
        again = RemoteCheckpoints(place_at(root))
        assert again.newest().version == found
        again.close()
        assert scratch() == []
        if not os.WIFSIGNALED(status):
            assert status == 0
            break
    assert seen == {V1, V2}
    assert number > 20


def save_until(root, boundary):
    checkpoints = RemoteCheckpoints(place_at(root), keep=1)
    left = boundary

    def reach(event, _arguments):
        nonlocal left
        if event in ALTERING:
            left -= 1
            if not left:
                die()

    sys.addaudithook(reach)
    save(checkpoints, V2)


@pytest.mark.parametrize("kind", [ReferenceTrainer, TorchTrainer])
def test_a_trainer_goes_on_from_its_checkpoint_on_another_machine(kind, machine, root):
    first = build(kind, checkpoints=place_at(root))
    train(first, 1)
    assert first.call(Save(V1)) == [Saved(V1)]
    train(first, 2)
    expected = weights(first)
    machine("second")
    second = build(kind, checkpoints=place_at(root))
    assert second.worker.info().restored == V1
    train(second, 2)
    assert all((weights(second)[name] == tensor).all() for name, tensor in expected.items())
    second.worker.close()
    assert scratch() == []


def test_a_trainer_answers_that_a_save_failed(root):
    driver: Driver = build(ReferenceTrainer, checkpoints=CheckpointPlace(Full(root), "run-1"))
    driver.call(Train(1, V1, batch(1)))
    (answer,) = driver.call(Save(V1))
    assert isinstance(answer, SaveFailed)
    assert "no space left" in answer.reason
    assert held_at(FolderFiles(Path(root))) == []
