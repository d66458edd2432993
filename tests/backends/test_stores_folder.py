import errno
import hashlib
import json
import os
import pickle
import resource
import signal
import threading

import msgspec
import pytest
import torch
from safetensors import safe_open
from store_parts import POINTS, SPAWN, die, in_process, publish_many, read_all

from rollart.backends.stores.folder import FolderStore, write_file
from rollart.backends.stores.tensors import pack, unpack
from rollart.conformance.weights import make, publish_adapter
from rollart.types.errors import DigestMismatch, RequestError, VersionMissing, WeightError
from rollart.types.versions import Version
from rollart.types.weights import TensorEntry

V = [Version(0, step) for step in range(12)]


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "weights")


def publish(store, *versions):
    for version in versions:
        store.publish(*make(version))


def holds(store, version):
    return [bytes(store.bucket(version, index)) for index in range(3)] == make(version)[1]


def names(tmp_path):
    return sorted(path.name for path in (tmp_path / "weights").iterdir())


def test_other_processes_publish_and_read(store):
    assert in_process(publish_many, store, 1, 2) == 0
    assert store.newest() == Version(1, 2)
    answers = SPAWN.Queue()
    process = SPAWN.Process(target=read_all, args=(store, [Version(1, 1)], answers))
    process.start()
    assert answers.get(timeout=250) == [make(Version(1, 1))[1]]
    process.join()
    with pytest.raises(WeightError, match="not newer"):
        publish(store, V[9])


def test_only_so_many_versions_are_kept(tmp_path):
    store = FolderStore(tmp_path / "weights", keep=2)
    publish(store, *V[1:6])
    assert names(tmp_path) == [".lock", "step-00000004.epoch-0", "step-00000005.epoch-0"]
    with pytest.raises(VersionMissing, match=r"holds v0\.4, v0\.5"):
        store.bucket(V[3], 0)


def test_the_fence_outlives_the_newest_version(store):
    publish(store, V[1], V[2])
    store.drop(V[2])
    again = pickle.loads(pickle.dumps(store))
    assert again.newest() == V[1]
    with pytest.raises(WeightError, match="not newer"):
        publish(again, V[2])
    publish(again, V[3])


@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("folder")])
def test_a_publisher_killed_in_the_middle_leaves_the_newest_whole(store, tmp_path, point):
    publish(store, V[1], V[2], V[3])
    assert in_process(die, store, V[4], point) == -signal.SIGKILL
    assert store.newest() == V[3]
    assert [holds(store, version) for version in V[1:4]] == [True] * 3
    with pytest.raises(VersionMissing):
        store.manifest(V[4])
    publish(store, V[4])
    assert holds(store, V[4])
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]


def test_a_publisher_that_was_overtaken_cannot_commit_its_draft(store, tmp_path):
    """A successor clears the draft of one that was only slow: the slow one fails, and nothing is half there."""

    def slow(path, parts):
        write_file(path, parts)
        if path.name == "manifest.json":
            publish(store, V[2])

    with pytest.raises(WeightError):
        FolderStore(tmp_path / "weights", write=slow).publish(*make(V[1]))
    assert store.newest() == V[2]
    assert names(tmp_path) == [".lock", "step-00000002.epoch-0"]


def test_of_several_publishers_of_a_version_one_wins(store):
    lost = []
    barrier = threading.Barrier(4)

    def run():
        barrier.wait()
        try:
            publish(store, V[1])
        except WeightError:
            lost.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lost) == 3
    assert holds(store, V[1])


@pytest.mark.parametrize("name", ["bucket-00001.safetensors", "manifest.json"])
def test_a_full_disk_publishes_nothing(tmp_path, name):
    def full(path, parts):
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_file(path, parts)

    store = FolderStore(tmp_path / "weights")
    publish(store, V[1])
    with pytest.raises(WeightError, match=r"No space left.*Nothing was published.*takes 240 bytes"):
        FolderStore(tmp_path / "weights", write=full).publish(*make(V[2]))
    assert names(tmp_path) == [".lock", "step-00000001.epoch-0"]
    assert holds(store, V[1])
    publish(store, V[2])


def publish_under_a_limit(store, version):
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))
    with pytest.raises(WeightError, match="File too large"):
        store.publish(*make(version))


def test_a_limit_of_the_system_is_a_clear_error_too(store, tmp_path):
    publish(store, V[1])
    assert in_process(publish_under_a_limit, store, V[2]) == 0
    assert names(tmp_path) == [".lock", "step-00000001.epoch-0"]


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_a_cut_bucket_is_noticed(store, tmp_path, cut):
    publish(store, V[1])
    path = tmp_path / "weights/step-00000001.epoch-0/bucket-00001.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DigestMismatch):
        store.bucket(V[1], 1)
    assert bytes(store.bucket(V[1], 0)) == make(V[1])[1][0]


def test_a_damaged_header_is_noticed(store, tmp_path):
    publish(store, V[1])
    path = tmp_path / "weights/step-00000001.epoch-0/bucket-00001.safetensors"
    for length in (b"\xff" * 8, b"\0" * 8, b"\xff\xff\0\0\0\0\0\0"):
        path.write_bytes(length + path.read_bytes()[8:])
        with pytest.raises(DigestMismatch):
            store.bucket(V[1], 1)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"{}", b'{"digest":"00","manifest":{}}'])
def test_a_damaged_manifest_is_noticed(store, tmp_path, data):
    publish(store, V[1])
    (tmp_path / "weights/step-00000001.epoch-0/manifest.json").write_bytes(data)
    with pytest.raises(DigestMismatch, match="manifest"):
        store.manifest(V[1])


def test_a_version_of_an_earlier_rollart_is_read(store, tmp_path):
    manifest, buckets = make(V[1])
    old = tuple(hashlib.blake2b(data, digest_size=16).hexdigest() for data in buckets)
    store.publish(msgspec.structs.replace(manifest, digests=old), buckets)
    path = tmp_path / "weights/step-00000001.epoch-0/manifest.json"
    whole = json.loads(path.read_bytes())
    record = msgspec.json.encode(store.manifest(V[1]))
    assert whole["digest"] == hashlib.blake2b(record, digest_size=16).hexdigest(), "as earlier versions wrote it"
    assert [bytes(store.bucket(V[1], index)) for index in range(3)] == list(buckets)
    bucket = path.with_name("bucket-00001.safetensors")
    bucket.write_bytes(bucket.read_bytes()[:-1])
    with pytest.raises(DigestMismatch):
        store.bucket(V[1], 1)


def test_a_missing_file_is_named(store, tmp_path):
    publish(store, V[1])
    (tmp_path / "weights/step-00000001.epoch-0/bucket-00002.safetensors").unlink()
    with pytest.raises(VersionMissing, match=r"lacks bucket-00002"):
        store.bucket(V[1], 2)


def test_a_damaged_fence_is_not_guessed_around(store, tmp_path):
    publish(store, V[1])
    store.drop(V[1])
    (tmp_path / "weights/fence.json").write_bytes(b"?")
    with pytest.raises(WeightError, match=r"fence\.json is damaged"):
        publish(store, V[2])


def test_a_store_keeps_a_version_or_more(tmp_path):
    with pytest.raises(RequestError, match="1 version or more"):
        FolderStore(tmp_path, keep=0)


def test_other_tools_read_the_tensors_by_name(store, tmp_path):
    tied = torch.randn(5, 4)
    tensors = {
        "bf16": torch.randn(7, 5).to(torch.bfloat16),
        "tied": tied,
        "tied.again": tied,
        "large": torch.randn(64, 8),
        "scalar": torch.tensor(2.5),
    }
    manifest, buckets = pack(tensors, version=V[1], parent=None, bucket_bytes=1024)
    store.publish(manifest, buckets)
    found = {}
    for path in sorted((tmp_path / "weights/step-00000001.epoch-0").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["version"] == "v0.1"
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    found = {name: tensor for name, tensor in found.items() if not name.startswith(".gap")}
    assert torch.equal(found["bf16"], tensors["bf16"])
    assert torch.equal(found["tied"], tied)
    assert torch.equal(torch.cat([found["large"], found["large.shard-1"]]), tensors["large"])
    assert torch.equal(found["scalar"], tensors["scalar"])
    again = unpack(manifest, [store.bucket(V[1], index) for index in range(len(buckets))])
    assert torch.equal(again["tied.again"], tied)


def test_entries_that_are_no_tensors_travel_as_bytes(store, tmp_path):
    manifest, buckets = make(V[1])
    strange = TensorEntry(name="x", dtype="int4", shape=(128,), bucket=0, offset=0, nbytes=64)
    store.publish(msgspec.structs.replace(manifest, tensors=(strange,)), buckets)
    with safe_open(tmp_path / "weights/step-00000001.epoch-0/bucket-00000.safetensors", framework="np") as file:
        assert bytes(file.get_tensor("bucket")) == buckets[0]


def test_a_base_goes_together_with_its_adapters(tmp_path):
    store = FolderStore(tmp_path, keep=2)
    store.publish(*make(Version(0, 1)))
    for step in range(2, 6):
        publish_adapter(store, Version(0, step), on=Version(0, 1))
    assert store._held() == [Version(0, step) for step in (1, 4, 5)]
    store.publish(*make(Version(1, 5)))
    assert store._held() == [Version(0, 1), Version(0, 5), Version(1, 5)]
    publish_adapter(store, Version(1, 6), on=Version(1, 5))
    assert store._held() == [Version(1, 5), Version(1, 6)]
