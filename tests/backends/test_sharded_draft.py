"""Versions that the ranks of a trainer publish together, each its own rows."""

import os
from collections import Counter

import pytest
import torch
from packed_parts import samples
from parts import TINY, V1, V2, Driver
from sharded_store import ShardedFolder
from test_lora import LORA, own_whole, read
from test_torch_trainer import SETTINGS, train

from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.tensors import Packed, joined, unpack
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.ports.weights import ShardedWeightStore
from rollart.types.messages import Publish, Published, Train, TrainerFailed
from rollart.types.versions import Version
from rollart.types.weights import WeightKind, verify_bucket

RANKS = 3
V0 = Version(0, 0)


@pytest.fixture
def trainer(forked_ranks):  # noqa: ARG001
    """Builds trainers, which are closed at the end."""
    built = []

    def build(store, ranks=RANKS, **settings):
        driver = Driver(TorchTrainer, {**SETTINGS, "store": store, "ranks": ranks, **settings})
        built.append(driver)
        return driver

    yield build
    for driver in built:
        driver.worker.close()


def published(driver, version):
    (event,) = driver.call(Publish(version))
    assert isinstance(event, Published), event
    return event.manifest


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_parts_are_joined_in_the_order_of_their_rows():
    rows = torch.arange(40.0).view(10, 4)
    other = torch.arange(3.0)
    parts = [
        Packed({"rows": rows[:4], "twin": rows[:4]}, 32),  # two shards of two rows
        Packed({"rows": rows[4:9], "other": other}, 48),
        Packed({"rows": rows[9:]}, 32),
    ]
    manifest = joined([part.shards() for part in parts], V1, V0, WeightKind.FULL)
    buckets = [bytes(bucket) for part in parts for bucket in part]
    for index, bucket in enumerate(buckets):
        verify_bucket(manifest, index, bucket)
    found = unpack(manifest, buckets)
    assert torch.equal(found["rows"], rows)
    assert torch.equal(found["twin"], rows[:4])
    assert torch.equal(found["other"], other)
    assert (manifest.version, manifest.parent) == (V1, V0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_publishes_its_rows_and_no_more(trainer, tmp_path, dtype):
    store, alone = ShardedFolder(tmp_path), MemoryStore()
    assert isinstance(store, ShardedWeightStore)
    assert not isinstance(alone, ShardedWeightStore)
    together, one = trainer(store, dtype=dtype, bucket_bytes=8192), trainer(alone, ranks=1, dtype=dtype)
    manifest = published(together, V0)
    assert same(read(store, manifest), read(alone, published(one, V0)))
    writers = store.writers(V0)
    written = Counter()
    for index, nbytes in enumerate(manifest.bucket_bytes):
        written[writers[index]] += nbytes
    assert len(written) == RANKS
    assert os.getpid() in written
    assert max(written.values()) < 1.2 * manifest.total_bytes / RANKS
    assert max(manifest.bucket_bytes) <= 8192


def test_what_was_published_does_not_change_while_training_goes_on(trainer, tmp_path):
    store = ShardedFolder(tmp_path)
    driver = trainer(store)
    train(driver, 1)
    kept = {name: tensor.clone() for name, tensor in driver.worker._snapshot().items()}
    driver.call(Publish(V1), Train(2, V2, samples(2)))
    first = store.manifest(V1)
    assert same(read(store, first), kept)
    second = published(driver, V2)
    assert second.parent == V1
    assert same(read(store, second), dict(driver.worker._snapshot()))


def test_a_rank_that_cannot_write_ends_the_publication_and_the_next_one_works(trainer, tmp_path):
    store = ShardedFolder(tmp_path, refuses="put")
    driver = trainer(store, ranks=2)
    (failed,) = driver.call(Publish(V0))
    assert isinstance(failed, TrainerFailed)
    assert "given up" in failed.reason
    train(driver, 1)
    (failed,) = driver.call(Publish(V1))
    assert isinstance(failed, TrainerFailed)


@pytest.mark.parametrize("publish", ["adapter", "merged"])
def test_with_lora_the_full_versions_have_their_factors_in_them(trainer, tmp_path, publish):
    store = ShardedFolder(tmp_path)
    driver = trainer(store, lora={**LORA, "publish": publish}, learning_rate=1e-2)
    for step in (1, 2):
        train(driver, step)
    manifest = published(driver, V2)
    assert manifest.kind is WeightKind.FULL
    assert same(read(store, manifest), own_whole(driver))
    assert len(set(store.writers(V2).values())) == RANKS
    train(driver, 3)
    kind = WeightKind.FULL if publish == "merged" else WeightKind.ADAPTER
    assert published(driver, Version(0, 3)).kind is kind
    writers = set(store.writers(Version(0, 3)).values())
    assert len(writers) == (RANKS if publish == "merged" else 1)  # adapters are small: rank 0 publishes them


def test_a_tensor_with_fewer_rows_than_ranks(trainer, tmp_path):
    store = ShardedFolder(tmp_path)
    model = {"config": {**TINY["config"], "head_dim": 2}}  # norms of two rows
    driver = trainer(store, model=model)
    manifest = published(driver, V0)
    assert same(read(store, manifest), dict(driver.worker._snapshot()))
