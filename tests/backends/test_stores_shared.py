import gc
import os
import pickle
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from store_parts import POINTS, SPAWN, die, in_process, publish_many, read_all

from rollart.backends.stores.shared import SharedMemoryStore
from rollart.conformance.weights import make, publish_adapter
from rollart.types.errors import DigestMismatch, RequestError, VersionMissing, WeightError
from rollart.types.versions import Version
from rollart.types.weights import Manifest, WeightKind, bucket_digest

V = [Version(0, step) for step in range(12)]


@pytest.fixture
def store(tmp_path):
    with SharedMemoryStore.create("weights", slot_bytes=1 << 16, root=tmp_path) as store:
        yield store


def publish(store, *versions):
    for version in versions:
        store.publish(*make(version))


def holds(store, version):
    return [bytes(store.bucket(version, index)) for index in range(3)] == make(version)[1]


def test_another_process_reads_what_is_published(store):
    publish(store, V[1], V[2])
    answers = SPAWN.Queue()
    process = SPAWN.Process(target=read_all, args=(store, V[1:3], answers))
    process.start()
    assert answers.get(timeout=250) == [make(V[1])[1], make(V[2])[1]]
    process.join()


def test_another_process_publishes_and_fences_this_one(store):
    assert in_process(publish_many, store, 1, 2) == 0
    assert store.newest() == Version(1, 2)
    assert holds(store, Version(1, 1))
    with pytest.raises(WeightError, match="not newer"):
        publish(store, V[9])


def test_a_view_is_the_slot_itself_and_read_only(store):
    publish(store, V[1])
    view = store.bucket(V[1], 0)
    assert isinstance(view, memoryview)
    assert view.readonly


def test_the_oldest_version_makes_room(store):
    publish(store, *V[1:6])
    assert [holds(store, version) for version in V[3:6]] == [True] * 3
    with pytest.raises(VersionMissing, match=r"v0\.3, v0\.4, v0\.5"):
        store.manifest(V[2])


def test_a_slot_that_is_read_is_not_written_to(store):
    publish(store, V[1], V[2], V[3])
    view = store.bucket(V[1], 1)
    publish(store, V[4], V[5])  # into the slots of v0.2 and v0.3
    assert bytes(view) == make(V[1])[1][1]
    assert holds(store, V[1])
    assert holds(store, V[4])
    second = store.bucket(V[4], 0)
    with pytest.raises(WeightError, match=r"no slot is free for .*: of the 3"):
        publish(store, V[6])
    assert store.newest() == V[5]
    del view
    gc.collect()
    publish(store, V[6])
    assert bytes(second) == make(V[4])[1][0]


def test_a_dropped_version_that_is_read_stays_in_memory(store):
    publish(store, V[1])
    view = store.bucket(V[1], 0)
    store.drop(V[1])
    publish(store, V[2], V[3])
    with pytest.raises(VersionMissing):
        store.bucket(V[1], 0)
    assert bytes(view) == make(V[1])[1][0]


def hold_and_wait(store, version, answers, release):
    view = store.bucket(version, 0)
    answers.put("held")
    release.wait(250)
    answers.put(bytes(view))


def test_a_reader_in_another_process_keeps_its_slot_until_it_is_killed(store):
    publish(store, V[1], V[2], V[3])
    answers, release = SPAWN.Queue(), SPAWN.Event()
    reader = SPAWN.Process(target=hold_and_wait, args=(store, V[1], answers, release))
    reader.start()
    assert answers.get(timeout=250) == "held"
    publish(store, V[4], V[5])
    assert holds(store, V[1])
    os.kill(reader.pid, signal.SIGKILL)
    reader.join()
    publish(store, V[6])
    with pytest.raises(VersionMissing):
        store.manifest(V[1])


@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("shared")])
def test_a_publisher_killed_in_the_middle_leaves_the_newest_whole(store, point):
    publish(store, V[1], V[2], V[3])
    assert in_process(die, store, V[4], point) == -signal.SIGKILL
    assert store.newest() == V[3]
    assert holds(store, V[3])
    assert holds(store, V[2])
    with pytest.raises(VersionMissing):
        store.manifest(V[4])
    publish(store, V[4])
    assert holds(store, V[4])


def test_a_reader_never_gets_wrong_bytes_while_versions_fly_by(store):
    """Readers follow a publisher that laps them: a version as it was published, or an error that it is gone."""
    done, wrong, read = threading.Event(), [], []

    def follow():
        reader = pickle.loads(pickle.dumps(store))
        while not done.is_set():
            version = reader.newest()
            try:
                if version and not holds(reader, version):
                    wrong.append(version)
                read.append(version)
            except VersionMissing:
                pass

    threads = [threading.Thread(target=follow) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        publish_with_patience(store, lambda step: step >= 150 and len(set(read)) > 5)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong


def publish_with_patience(store, enough):
    """Publish step after step until it is enough; two readers may hold two of the three slots for a moment."""
    deadline = time.monotonic() + 100
    step = 0
    while not enough(step):
        assert time.monotonic() < deadline
        with suppress(WeightError):
            store.publish(*make(Version(0, step + 1)))
            step += 1
    assert store.newest() == Version(0, step)


def test_of_two_publishers_of_a_version_one_wins(store):
    lost = []
    barrier = threading.Barrier(3)

    def run():
        barrier.wait()
        try:
            publish(store, V[1])
        except WeightError:
            lost.append(1)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lost) == 2
    assert holds(store, V[1])


def test_a_version_larger_than_a_slot_is_refused_with_the_numbers(tmp_path):
    with SharedMemoryStore.create("small", slot_bytes=4096, root=tmp_path) as store:
        with pytest.raises(WeightError, match=r"v0\.1 takes 12,384 bytes, .* have 4,096"):
            publish(store, V[1])
        assert store.newest() is None


def test_a_cut_slot_and_a_damaged_manifest_are_noticed(store, tmp_path):
    publish(store, V[1], V[2])
    first, second = (tmp_path / f"rollart-weights/slot-{slot}" for slot in (0, 1))
    os.truncate(first, 100)
    with pytest.raises(DigestMismatch):
        pickle.loads(pickle.dumps(store)).bucket(V[1], 0)
    os.truncate(second, 9000)
    with pytest.raises(DigestMismatch, match="truncated"):
        store.bucket(V[2], 0)
    with second.open("r+b") as file:
        file.write(b"{")
        file.seek(40)
        file.write(b"?")
    with pytest.raises(DigestMismatch, match="manifest"):
        pickle.loads(pickle.dumps(store)).manifest(V[2])


def test_a_store_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(RequestError, match="do not fit"):
        SharedMemoryStore.create("huge", slot_bytes=1 << 50, root=tmp_path)
    assert not list(tmp_path.glob("rollart-huge*"))


@pytest.mark.parametrize("wrong", [{"name": "a/b"}, {"slots": 1}, {"slot_bytes": 0}, {"root": Path("/nowhere")}])
def test_settings_that_cannot_be_are_refused(tmp_path, wrong):
    settings = {"name": "w", "slot_bytes": 4096, "root": tmp_path} | wrong
    with pytest.raises(RequestError):
        SharedMemoryStore.create(settings.pop("name"), **settings)


def test_close_removes_everything_and_keeps_views(tmp_path):
    store = SharedMemoryStore.create("weights", slot_bytes=1 << 16, root=tmp_path)
    other = pickle.loads(pickle.dumps(store))
    publish(store, V[1])
    view = other.bucket(V[1], 2)
    other.close()  # not the owner
    assert holds(store, V[1])
    store.close()
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == [f"rollart-{os.getuid()}.lock"]
    assert bytes(view) == make(V[1])[1][2]
    with pytest.raises(VersionMissing, match="its owner closed it"):
        other.bucket(V[1], 0)
    with pytest.raises(VersionMissing):
        publish(other, V[2])


def own_and_die(root, name):
    store = SharedMemoryStore.create(name, slot_bytes=1 << 16, root=root)
    store.publish(*make(V[7]))
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_dead_owner_left_is_reclaimed_and_a_living_one_is_let_alone(store, tmp_path):
    publish(store, V[1])
    for name in ("dead", "again"):
        assert in_process(own_and_die, tmp_path, name) == -signal.SIGKILL
    assert (tmp_path / "rollart-again/index.json").exists()
    with SharedMemoryStore.create("again", slot_bytes=1 << 16, root=tmp_path) as fresh:
        assert fresh.newest() is None
        assert not (tmp_path / "rollart-dead").exists()
        assert holds(store, V[1])
        with pytest.raises(RequestError, match="another running process"):
            SharedMemoryStore.create("weights", slot_bytes=1 << 16, root=tmp_path)


def test_empty_buckets_are_kept_too(store):
    empty = Manifest(V[1], None, WeightKind.FULL, (), (0,), (bucket_digest(b""),))
    store.publish(empty, [b""])
    assert store.manifest(V[1]) == empty
    assert store.bucket(V[1], 0) == b""


# --- adapters -------------------------------------------------------------------------------------------------------


def publish_large(store, version):
    """A full version that does not fit into the slots for adapters."""
    data = bytes(1 << 15)
    store.publish(Manifest(version, None, WeightKind.FULL, (), (len(data),), (bucket_digest(data),)), [data])


def held(store):
    return [held.version for held in store._index().held]


def test_eviction_chooses_what_nothing_depends_on(store):
    publish(store, V[1])
    for version in V[2:7]:
        publish_adapter(store, version, on=V[1])
    assert held(store) == [V[1], V[5], V[6]]
    publish(store, V[7])  # the newest adapter goes with the next full version, not the base that it is on
    assert held(store) == [V[1], V[6], V[7]]
    publish(store, V[8])
    assert held(store) == [V[1], V[7], V[8]]
    publish(store, V[9])
    assert held(store) == [V[7], V[8], V[9]]


def test_a_base_goes_together_with_its_adapters(tmp_path):
    with SharedMemoryStore.create(
        "weights", slot_bytes=1 << 16, slots=2, adapter_bytes=1 << 14, root=tmp_path
    ) as store:
        publish_large(store, V[1])
        publish_adapter(store, V[2], on=V[1])
        publish_adapter(store, V[3], on=V[1])
        publish_large(store, Version(1, 1))
        assert held(store) == [V[1], V[2], V[3], Version(1, 1)]
        publish_large(store, Version(2, 1))
        assert held(store) == [Version(1, 1), Version(2, 1)]


def test_adapters_leave_the_large_slots_to_full_versions(tmp_path):
    with SharedMemoryStore.create("weights", slot_bytes=1 << 20, adapter_bytes=1 << 14, root=tmp_path) as store:
        publish_large(store, V[1])
        for version in V[2:9]:
            publish_adapter(store, version, on=V[1])
        sizes = {each.version: store._index().slot_bytes[each.slot] for each in store._index().held}
        assert sizes == {V[1]: 1 << 20, V[6]: 1 << 14, V[7]: 1 << 14, V[8]: 1 << 14}


def test_a_base_that_is_read_while_adapters_fly_by(store):
    publish(store, V[1])
    view = store.bucket(V[1], 1)
    for version in V[2:9]:
        publish_adapter(store, version, on=V[1])
        assert holds(store, V[1])
        assert holds(store, version)
    assert bytes(view) == make(V[1])[1][1]
