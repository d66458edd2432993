"""Checkpoints survive what happens to disks and to processes."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_parts import FILES, V1, V2, V3, contents, found, names, put

import rollart
import rollart.backends.trainers.checkpoint as checkpoint_module
from rollart.backends.trainers.checkpoint import STATE, Checkpoints, NotSaved, _State, write_file
from rollart.types.digests import bulk_digest
from rollart.types.errors import RequestError
from rollart.types.versions import Version

HERE = Path(__file__).parent
SOURCES = Path(rollart.__file__).parents[1]


def in_a_process(call: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", f"from pathlib import Path\nimport checkpoint_parts\ncheckpoint_parts.{call}"],
        env={**os.environ, "PYTHONPATH": f"{SOURCES}{os.pathsep}{HERE}"},
        timeout=250,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr


def test_the_newest_of_those_kept_is_found(tmp_path):
    root = tmp_path / "not" / "yet"
    assert found(root) is None
    put(root, V1, V2, V3, Version(1, 2))
    assert names(root) == ["step-00000002.epoch-1", "step-00000003.epoch-0"]
    assert found(root) == Version(1, 2)
    put(root, Version(1, 3), keep=1)
    assert names(root) == ["step-00000003.epoch-1"]


def test_a_trainer_that_was_replaced_harms_no_successor(tmp_path):
    replaced = put(tmp_path, V1)
    draft = tmp_path / ".step-00000001.epoch-1.tmp"  # the successor is at it
    draft.mkdir()
    replaced.save(V2, contents(V2), {"at": "v0.2"})
    assert draft.exists()
    put(tmp_path, Version(1, 1))
    for version in (V3, Version(1, 1)):
        with pytest.raises(NotSaved, match=r"not newer than the checkpoint of v1\.1"):
            replaced.save(version, contents(version), {})
    assert found(tmp_path) == Version(1, 1)


def test_all_of_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    steps = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(handle):
        steps.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def noted_rename(self, target):
        steps.append(f"{self.name} becomes {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    put(tmp_path, V1)
    name = "step-00000001.epoch-0"
    assert steps == [*FILES, f".{name}.tmp", f".{name}.tmp becomes {name}", tmp_path.name]


def test_a_process_killed_anywhere_leaves_a_whole_checkpoint(tmp_path):
    """SIGKILL before every call of a save that alters the disk, one process each."""
    in_a_process(f"die_at_every_boundary(Path({str(tmp_path)!r}))")
    folders = sorted(tmp_path.iterdir())
    versions = [found(folder) for folder in folders]
    renamed = versions.index(V2)
    assert versions == [V1] * renamed + [V2] * (len(versions) - renamed)
    assert renamed > 2 * len(FILES), "every file is opened and synced before the rename, the folders too"
    assert len(versions) > renamed + len(FILES), "the old checkpoint is removed file by file after it"
    for folder in folders:
        put(folder, Version(1, 2), keep=1)
        assert names(folder) == ["step-00000002.epoch-1"], "what was left halfway goes with the next save"


def test_a_process_killed_in_a_file_leaves_the_one_before(tmp_path):
    in_a_process(f"die_in_every_file(Path({str(tmp_path)!r}))")
    folders = sorted(tmp_path.iterdir())
    assert [found(folder) for folder in folders] == [V1] * len(FILES) + [V2]
    for folder in folders[:-1]:
        assert names(folder) == [".step-00000002.epoch-0.tmp", "step-00000001.epoch-0"]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_passed_over_for_the_checkpoint_before(tmp_path, caplog, name):
    def flipped(data, place):
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    put(tmp_path, V1, V2)
    path = tmp_path / "step-00000002.epoch-0" / name
    good = path.read_bytes()
    step = max(1, len(good) // 50)
    damages = [flipped(good, place) for place in (*range(0, len(good), step), len(good) - 1)]
    for bad in (*damages, good[:-1], good[: len(good) // 2], b""):
        path.write_bytes(bad)
        caplog.clear()
        assert found(tmp_path) == V1
        (record,) = caplog.records
        assert (record.levelno, "step-00000002.epoch-0" in record.message) == (logging.WARNING, True)
    path.unlink()
    assert found(tmp_path) == V1
    path.write_bytes(good)
    assert found(tmp_path) == V2


def test_damage_does_not_count_as_a_checkpoint_kept(tmp_path):
    put(tmp_path, V1, V2)
    (tmp_path / "step-00000002.epoch-0" / "model.safetensors").unlink()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest().version == V1
    checkpoints.save(V2, contents(V2), {"at": "v0.2"})  # the same one, again
    assert names(tmp_path) == ["step-00000001.epoch-0", "step-00000002.epoch-0"]
    (tmp_path / "step-00000002.epoch-0" / "config.json").write_bytes(b"")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.newest()
    checkpoints.save(Version(1, 2), contents(Version(1, 2)), {"at": "v1.2"})
    assert names(tmp_path) == ["step-00000001.epoch-0", "step-00000002.epoch-1"]


def test_a_folder_under_another_name_is_not_that_version(tmp_path):
    put(tmp_path, V1, V2)
    (tmp_path / "step-00000001.epoch-0").rename(tmp_path / "step-00000009.epoch-0")
    assert found(tmp_path) == V2


def test_no_run_is_thrown_away_in_silence(tmp_path):
    put(tmp_path, V1, V2)
    for folder in tmp_path.iterdir():
        (folder / STATE).unlink()
    with pytest.raises(RequestError, match="none of the 2 checkpoints"):
        Checkpoints(tmp_path).newest()


@pytest.mark.parametrize("full_at", FILES)
def test_a_full_disk_is_said_and_leaves_the_one_before(tmp_path, full_at):
    def write(path, data):
        # The device that is always full: a real ENOSPC, after a part of the file is there.
        write_file(path, data[:7])
        if path.name == full_at:
            with Path("/dev/full").open("wb") as full:
                full.write(data)
        path.write_bytes(data)

    put(tmp_path, V1)
    with pytest.raises(NotSaved, match=r"v0\.2 .*No space left on device.*The previous one is intact") as failed:
        put(tmp_path, V2, write=write, keep=1)
    assert failed.value.__cause__.errno == errno.ENOSPC
    assert names(tmp_path) == ["step-00000001.epoch-0"]
    assert found(tmp_path) == V1
    put(tmp_path, V2)
    assert found(tmp_path) == V2


@pytest.mark.parametrize("at", ["draft", "root"])
def test_a_disk_that_fails_at_the_end_leaves_the_one_before(tmp_path, monkeypatch, at):
    fsync = os.fsync

    def failing(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path == tmp_path if at == "root" else path.suffix == ".tmp":
            raise OSError(errno.EIO, "Input/output error")
        fsync(handle)

    put(tmp_path, V1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        with pytest.raises(NotSaved, match="Input/output error"):
            put(tmp_path, V2)
    assert names(tmp_path) == ["step-00000001.epoch-0"]
    assert found(tmp_path) == V1


def test_a_folder_that_cannot_be_is_said(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotSaved, match="cannot write the checkpoint"):
        put(tmp_path / "file" / "checkpoints", V1)


@pytest.mark.parametrize("name", ["model.pt", "../secret.json", "sub/model.safetensors"])
def test_only_safetensors_and_json_of_the_folder_are_read(tmp_path, name, caplog):
    """Other files are not read even if `state.json` lists them with the right digests."""
    put(tmp_path, V1, V2)
    payload = b"\x80\x05 a pickle"
    folder = tmp_path / "step-00000002.epoch-0"
    (folder / "sub").mkdir()
    (folder / name).write_bytes(payload)
    files = {file: bulk_digest(data) for file, data in contents(V2)} | {name: bulk_digest(payload)}
    (folder / STATE).write_bytes(_State(version=V2, files=files, facts={}).sealed())
    assert found(tmp_path) == V1
    assert "only safetensors and JSON" in caplog.text


def test_a_checkpoint_of_an_earlier_rollart_is_verified(tmp_path, caplog):
    """Its `state.json`, as it was written when digests did not name their algorithm."""
    put(tmp_path, Version(0, 0))
    folder = tmp_path / "step-00000001.epoch-0"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"config")
    (folder / STATE).write_bytes(
        b'{"format":1,"version":[0,1],"files":{"config.json":"ef8007cb351bb8a01e4cab54f70e3536"},"facts":{"skipped":0},'
        b'"digest":"4c5a91511585027c360e3b94d26ff7b3"}'
    )
    assert Checkpoints(tmp_path).newest().version == V1
    (folder / "config.json").write_bytes(b"confih")
    assert found(tmp_path) == Version(0, 0)
    assert "config.json does not match" in caplog.text


def test_a_checkpoint_of_a_newer_rollart_is_an_error_and_stays(tmp_path):
    put(tmp_path, V1, V2)
    files = {file: "xxh5:00" for file, _ in contents(V2)}
    (tmp_path / "step-00000002.epoch-0" / STATE).write_bytes(_State(version=V2, files=files, facts={}).sealed())
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(RequestError, match=r"config\.json of checkpoint .*step-00000002\.epoch-0: .*'xxh5'"):
        checkpoints.newest()
    checkpoints.save(V3, contents(V3), {})
    assert names(tmp_path) == ["step-00000002.epoch-0", "step-00000003.epoch-0"]


def test_files_of_several_chunks_are_verified(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "CHUNK_BYTES", 100)
    put(tmp_path, V1, V2)
    assert found(tmp_path) == V2
    path = tmp_path / "step-00000002.epoch-0" / "model.safetensors"
    data = path.read_bytes()
    assert len(data) % 100
    path.write_bytes(data[:-1] + b"?")
    assert found(tmp_path) == V1


def test_files_that_the_state_does_not_name_cannot_be_reached(tmp_path):
    put(tmp_path, V1)
    (tmp_path / "step-00000001.epoch-0" / "training_args.bin").write_bytes(b"\x80\x05 a pickle")
    (tmp_path / "step-00000009.epoch-0.pt").write_bytes(b"\x80\x05 a pickle")
    assert found(tmp_path) == V1
    with pytest.raises(RequestError, match=r"training_args\.bin"):
        Checkpoints(tmp_path).newest().file("training_args.bin")
