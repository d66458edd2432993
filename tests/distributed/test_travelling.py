"""Folders that travel: what a worker's settings become, and the copies that a node keeps."""

import os
import tempfile
import threading

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from rollart.distributed import travelling
from rollart.distributed.folder_files import FolderFiles, NamedFolders
from rollart.distributed.ray_files import CHECKPOINTS, FOLDERS, ControllerFiles, RayFiles, repeated
from rollart.distributed.travelling import TravellingFolder, fetch_copy, pack, unpack
from rollart.ports.folder_transfer import Held, entries_of, node_folder
from rollart.types.digests import bulk_digest
from rollart.types.errors import FilesError, FolderDamaged, FolderMissing
from rollart.types.files import folder_digest


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine of its own: temporary folder, and no copies in use."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(travelling, "_used", {})
    yield
    for held in travelling._used.values():
        held.close()


def model(folder, content=b"weights"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(content)
    return folder


def served(*folders):
    return NamedFolders({folder_digest(entries_of(path)): (path, entries_of(path)) for path in folders})


def copies():
    return sorted(path.name for path in node_folder("models").iterdir() if not path.name.startswith("."))


class Counting(NamedFolders):
    gets = 0

    def get(self, folder, target):
        self.gets += 1
        super().get(folder, target)


def test_a_copy_is_fetched_once_per_node(tmp_path):
    own = model(tmp_path / "model")
    files = Counting({folder_digest(entries_of(own)): (own, entries_of(own))})
    (digest,) = files.folders()
    found = []
    threads = [threading.Thread(target=lambda: found.append(fetch_copy(files, digest))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files.gets == 1
    assert set(found) == {node_folder("models") / digest}
    assert entries_of(found[0]) == entries_of(own)


def test_a_copy_that_was_changed_is_fetched_again(tmp_path):
    own = model(tmp_path / "model")
    files = served(own)
    (digest,) = files.folders()
    copy = fetch_copy(files, digest)
    (copy / "model.safetensors").write_bytes(b"edited!")
    assert entries_of(fetch_copy(files, digest)) == entries_of(own)


def test_a_source_that_changed_is_refused(tmp_path):
    own = model(tmp_path / "model")
    files = served(own)
    (digest,) = files.folders()
    (own / "model.safetensors").write_bytes(b"edited!")
    with pytest.raises(FolderDamaged, match=r"model\.safetensors"):
        fetch_copy(files, digest)
    assert copies() == []


def test_unused_copies_are_bounded(tmp_path):
    models = [model(tmp_path / f"model-{number}", bytes([number])) for number in range(4)]
    files = served(*models)
    digests = [folder_digest(entries_of(path)) for path in models]
    used = Held(node_folder("models") / digests[0])
    for number, digest in enumerate(digests):
        copy = fetch_copy(files, digest)
        os.utime(copy, (number, number))
        travelling._used.pop(copy).close()  # its process ended
    assert set(copies()) == {digests[0], *digests[2:]}  # one in use, one unused, and the last
    used.close()


def test_links_travel_as_files_and_nothing_else_is_read(tmp_path):
    own = model(tmp_path / "model")
    blob = tmp_path / "blob"
    blob.write_bytes(b"linked")
    (own / "tokenizer.json").symlink_to(blob)
    (own / "sub").mkdir()
    files = served(own)
    (digest,) = files.folders()
    copy = fetch_copy(files, digest)
    assert (copy / "tokenizer.json").read_bytes() == b"linked"
    assert not (copy / "tokenizer.json").is_symlink()
    with pytest.raises(FilesError):
        files.read(digest, "../blob", 0)
    with pytest.raises(FolderMissing):
        files.read("other", "config.json", 0)


def test_a_link_in_the_run_folder_is_not_followed(tmp_path):
    place = tmp_path / "checkpoints"
    (place / "step-1").mkdir(parents=True)
    (place / "step-1" / "state.json").symlink_to("/etc/passwd")
    (place / "step-2").symlink_to(tmp_path)
    for folder in ("step-1", "step-2"):
        with pytest.raises(FilesError, match="is a link"):
            FolderFiles(place).contents(folder)
        with pytest.raises(FilesError, match="is a link"):
            FolderFiles(place).read(folder, "state.json", 0)


@pytest.fixture
def controller(local_ray, tmp_path):  # noqa: ARG001 - it has to be there
    run = tmp_path / "run"
    run.mkdir()
    own = model(tmp_path / "model")
    files = ControllerFiles(run, checkpoints=run / "checkpoints", logs=run / "logs", folders=[own])
    yield files
    files.close()


def test_settings_name_the_same_folder_on_the_controllers_node(controller, tmp_path):
    path = str(tmp_path / "model")
    settings = {"model": path, "codec_settings": {"folder": path}, "model_source": tmp_path / "model", "slots": 3}
    packed = pack(settings, controller)
    assert isinstance(packed["model"], TravellingFolder)
    assert isinstance(packed["codec_settings"]["folder"], TravellingFolder)
    assert unpack(packed) == settings


def test_a_folder_that_is_not_here_is_fetched_from_the_controller(controller, tmp_path):
    (digest,) = controller.travelling.values()
    elsewhere = controller.home.__class__("another node", controller.home.actor, controller.home.namespace)
    assert TravellingFolder(str(tmp_path / "model"), digest, elsewhere).here() == tmp_path / "model"  # the same files
    copy = TravellingFolder("/not/here", digest, elsewhere).here()
    assert copy == node_folder("models") / digest
    assert entries_of(copy) == entries_of(tmp_path / "model")


def test_the_actor_itself_refuses_paths(controller, tmp_path):
    """Names are checked where files are, not only by those who ask."""
    actor, files = controller.home.handle(), controller.checkpoints
    source = model(tmp_path / "source")
    files.put(source, "step-1")
    draft = files._call("begin", "step-2")
    attempts = [
        ("begin", "../outside"),
        ("write", draft, "../../journal.sqlite", 0, b"x", bulk_digest(b"x")),
        ("write", "../step-1", "config.json", 0, b"x", bulk_digest(b"x")),
        ("commit", draft, "../outside", ()),
        ("delete", ".."),
        ("read", "..", "journal.sqlite", 0),
        ("read", "step-1", "../../journal.sqlite", 0),
        ("contents", "../logs"),
    ]
    for method, *order in attempts:
        with pytest.raises(FilesError):
            repeated(lambda _, method=method, order=order: getattr(actor, method).remote(CHECKPOINTS, *order))
    files._call("abandon", "../step-1")
    assert files.folders() == ["step-1"]
    (digest,) = controller.travelling.values()
    with pytest.raises(FilesError, match="reading only"):
        RayFiles(controller.home, FOLDERS).delete(digest)


def test_a_place_outside_of_the_run_folder_is_not_served(local_ray, tmp_path):  # noqa: ARG001
    with pytest.raises(FilesError, match="not below the run folder"):
        ControllerFiles(tmp_path / "run", checkpoints=tmp_path / "other", logs=tmp_path / "run/logs")


def test_a_controller_that_is_gone_is_named(controller):
    files = controller.checkpoints
    files.folders()
    controller.close()
    with pytest.raises(FilesError, match="the controller, which holds the files of this run, is gone"):
        _ = [files.folders() for _ in range(100)]
