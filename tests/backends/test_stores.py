import pickle
import threading

import msgspec
import pytest
import torch
from parts import V1, V2, V3, publish, tiny_model

from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.tensors import pack, unpack, verify_fit
from rollart.types.errors import DigestMismatch, RequestError, VersionMissing, WeightError
from rollart.types.weights import verify_bucket


def packed(tensors, bucket_bytes=1 << 20):
    return pack(tensors, version=V1, parent=None, bucket_bytes=bucket_bytes)


def test_a_published_version_is_read_back():
    store = MemoryStore()
    assert store.newest() is None
    manifest = publish(store, V1)
    assert store.newest() == V1
    assert store.manifest(V1) == manifest
    assert sum(len(store.bucket(V1, index)) for index in range(len(manifest.digests))) == manifest.total_bytes


def test_versions_only_grow_also_past_a_dropped_one():
    store = MemoryStore()
    publish(store, V2)
    store.drop(V2)
    store.drop(V3)
    for version in (V1, V2):
        with pytest.raises(WeightError, match="not newer"):
            publish(store, version)
    publish(store, V3)


def test_a_wrong_digest_publishes_nothing():
    store = MemoryStore()
    manifest, buckets = packed({"a": torch.ones(4)})
    with pytest.raises(DigestMismatch):
        store.publish(manifest, [b"\0" * len(buckets[0])])
    with pytest.raises(WeightError, match="buckets"):
        store.publish(manifest, [])
    assert store.newest() is None
    store.publish(manifest, buckets)


def test_what_is_not_there_is_missing():
    store = MemoryStore()
    publish(store, V1)
    with pytest.raises(VersionMissing, match=r"v0\.2"):
        store.manifest(V2)
    with pytest.raises(VersionMissing):
        store.bucket(V2, 0)
    with pytest.raises(VersionMissing):
        store.bucket(V1, 10_000)


def test_the_publishers_buffer_may_change_afterwards():
    store = MemoryStore()
    manifest, buckets = packed({"a": torch.ones(4)})
    buffer = bytearray(buckets[0])
    store.publish(manifest, [memoryview(buffer)])
    buffer[0] ^= 1
    verify_bucket(manifest, 0, store.bucket(V1, 0))


def test_a_store_is_not_pickled():
    with pytest.raises(RequestError, match="one process"):
        pickle.dumps(MemoryStore())


def test_of_two_publishers_of_a_version_one_wins():
    store = MemoryStore()
    manifest, buckets = packed({"a": torch.ones(1000)})
    lost = []
    barrier = threading.Barrier(4)

    def run():
        barrier.wait()
        try:
            store.publish(manifest, buckets)
        except WeightError:
            lost.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lost) == 3


@pytest.mark.parametrize("bucket_bytes", [64, 1000, 1 << 20])
def test_tensors_survive_whatever_their_dtype_and_shape(bucket_bytes):
    tensors = {
        "bf16": torch.randn(7, 5).to(torch.bfloat16),
        "f32": torch.randn(33, 3),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "int": torch.arange(9),
        "transposed": torch.randn(4, 6).t(),
        "bool": torch.tensor([True, False, True]),
    }
    manifest, buckets = packed(tensors, bucket_bytes)
    assert max(manifest.bucket_bytes) <= bucket_bytes
    out = unpack(manifest, buckets)
    assert list(out) == list(tensors)
    for name, tensor in tensors.items():
        assert out[name].dtype == tensor.dtype
        assert torch.equal(out[name], tensor)
    verify_fit(out, tensors, V1)


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_tied_tensors_are_stored_once_and_stay_tied(bucket_bytes):
    state = tiny_model().state_dict()
    manifest, buckets = packed(state, bucket_bytes)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(state)
    once = sum(t.numel() * 4 for name, t in state.items() if name != "lm_head.weight")
    assert once <= manifest.total_bytes < once + state["lm_head.weight"].numel() * 4
    out = unpack(manifest, buckets)
    assert out["lm_head.weight"].data_ptr() == out["model.embed_tokens.weight"].data_ptr()


def test_a_manifest_that_lies_is_refused():
    manifest, buckets = packed({"a": torch.ones(4)})
    entry = manifest.tensors[0]
    replace = msgspec.structs.replace
    for lie in ({"shape": (5,)}, {"dtype": "float7"}, {"dtype": "float16"}, {"offset": 8}, {"bucket": 3}):
        forged = replace(manifest, tensors=(replace(entry, **lie),))
        with pytest.raises(WeightError, match="'a'"):
            unpack(forged, buckets)
    with pytest.raises(WeightError, match="shards"):
        unpack(replace(manifest, tensors=(replace(entry, shard=1),)), buckets)


def test_tensors_of_another_model_do_not_fit():
    wanted = {"a": torch.ones(4)}
    verify_fit({"a": torch.ones(4, dtype=torch.bfloat16)}, wanted, V1)
    for other in ({"a": torch.ones(5)}, {"b": torch.ones(4)}, {}, {"a": torch.ones(4, dtype=torch.int32)}):
        with pytest.raises(WeightError, match="same model"):
            verify_fit(other, wanted, V1)


def test_a_row_larger_than_a_bucket_is_refused():
    with pytest.raises(RequestError, match="bucket_bytes"):
        packed({"a": torch.ones(2, 100)}, 64)
