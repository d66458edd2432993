"""A trainer of four ranks on two raylets: it computes as one process, and is lost and restarted as one worker.

Every test takes minutes: `make test-long`. Ranks of one machine are tested in `test_ray_ranks_local.py`.
"""

import asyncio
import os
import pickle
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

sys.path.append(str(Path(__file__).parents[1] / "backends"))

from msgspec.structs import replace
from packed_parts import samples
from parts import TINY, Driver
from ray_workers import runs, wait_until
from trial_nodes import kill_raylet, trial_nodes
from worker_settings import worker_settings

from rollart.backends.stores.folder import FolderStore
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.tensors import unpack
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.distributed.code_travel import Code
from rollart.distributed.ray_placement import read_nodes, read_workers
from rollart.distributed.ray_ranks import RayRanks
from rollart.distributed.ray_runtime import RayRuntime
from rollart.distributed.ray_weights import ray_weights
from rollart.types.messages import Publish, Published, Role, Save, Saved, Train, Trained, TrainerFailed
from rollart.types.placement import ACCELERATOR, ANYWHERE, Needs
from rollart.types.rank_shares import split
from rollart.types.versions import Version

pytestmark = pytest.mark.long

FACTORY = "rollart.backends.trainers.torch_trainer:TorchTrainer"
RANKS = 4
PATIENCE_S = 200.0
NEEDS = Needs(cpus=1, labels={ACCELERATOR: "H20"}, fallback=(ANYWHERE,), pool="H20")
SETTINGS = {"model": TINY, "learning_rate": 1e-3, "token_budget": 60}
"""With a larger rate Adam amplifies the last bits of float32: by the tenth step beyond the tolerance."""


class Listener:
    def __init__(self):
        self.infos, self.got, self.deaths, self.nodes = {}, [], {}, {}
        self.news = asyncio.Event()

    def waits(self, worker, why): ...

    def leaves(self, worker, why): ...

    def nodes_seen(self, nodes): ...

    def placed(self, worker, node, why):  # noqa: ARG002
        self.nodes[worker] = node

    def joined(self, worker, info):
        self.infos[worker] = info
        self.news.set()

    def events(self, worker, events):  # noqa: ARG002
        self.got += events
        self.news.set()

    def died(self, worker, reason):
        self.deaths[worker] = reason
        self.news.set()

    def failed(self, error):
        raise error

    async def until(self, condition):
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.news.clear()
                await self.news.wait()


class Trainer:
    """A trainer worker of the runtime, driven by commands."""

    def __init__(self, runtime, listener, folder, ranks=RANKS):
        self.runtime, self.listener, self.name = runtime, listener, "trainer/0.0"
        flat = {**SETTINGS, "ranks": ranks, "store": FolderStore(folder / "weights")}
        flat |= {"checkpoints": str(folder / "checkpoints"), "minibatches": 2}
        self.settings = worker_settings(TorchTrainer, flat)
        self.settings["rank_starter"] = RayRanks(ranks, 2, NEEDS)

    async def start(self, number=0):
        self.name = f"trainer/0.{number}"
        self.runtime.spawn(self.name, Role.TRAINER, FACTORY, self.settings, needs=NEEDS)
        await self.listener.until(lambda: self.name in self.listener.infos or self.name in self.listener.deaths)
        assert self.name in self.listener.infos, self.listener.deaths
        return self.listener.infos[self.name]

    async def ask(self, command):
        before = len(self.listener.got)
        self.runtime.post(self.name, [command])
        await self.listener.until(lambda: len(self.listener.got) > before or self.name in self.listener.deaths)
        assert self.name not in self.listener.deaths, self.listener.deaths
        return self.listener.got[-1]

    async def lost(self):
        await self.listener.until(lambda: self.name in self.listener.deaths)
        return self.listener.deaths[self.name]


@pytest.fixture(scope="module")
def nodes():
    with trial_nodes("cpu=1,H20=2", cpus=2) as cluster:
        yield cluster


@pytest.fixture
def with_trainer(nodes, tmp_path):  # noqa: ARG001
    def run(test):
        # Ranks of the test before give back their room a moment later.
        wait_until(
            lambda: not read_workers() and all(node.free.get("CPU") == node.total.get("CPU") for node in read_nodes())
        )

        async def main():
            code = Code(tmp_path, (), ())
            runtime, listener = RayRuntime(tmp_path / "logs", code=code), Listener()
            runtime.listen(listener)
            try:
                await test(Trainer(runtime, listener, tmp_path))
            finally:
                await runtime.close()

        asyncio.run(main())

    return run


def batch(step):
    return tuple(replace(each, trajectory=100 * step + each.trajectory) for each in samples(step))


def train(step):
    return Train(step, Version(0, step), batch(step))


def ranks_of(logs):
    """Pids of the ranks other than 0, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # just ended
                log = os.readlink(entry / "fd" / "1")
                match = re.fullmatch(rf"{re.escape(str(logs))}/trainer/0\.\d+\.rank-(\d)\.log", log)
                if match:
                    found[int(match[1])] = int(entry.name)
    return found


def test_ten_batches_have_the_losses_of_one_process(with_trainer, tmp_path):
    async def test(trainer):
        alone = Driver(TorchTrainer, {**SETTINGS, "minibatches": 2, "store": FolderStore(tmp_path / "other")})
        await trainer.start()
        homes = [each.node for each in read_workers() if each.worker.startswith("trainer/0.0")]
        assert len(homes) == RANKS
        assert sorted(map(homes.count, set(homes))) == [2, 2]
        for step in range(1, 11):
            (expected,) = alone.call(train(step))
            found = await trainer.ask(train(step))
            assert isinstance(found, Trained), found
            for name in ("loss", "grad_norm", "mismatch", "tokens", "sequences"):
                assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4), (step, name)
        broken = batch(11)
        broken[1].sequences[0]._logprobs = None
        assert isinstance(await trainer.ask(Train(11, Version(0, 11), broken)), TrainerFailed)
        assert isinstance(await trainer.ask(train(12)), Trained)  # a refused batch leaves all ranks usable
        sender = trainer.runtime._hosts[trainer.name].shares
        whole = sum(len(pickle.dumps(split(batch(step), 1, 2)[0])) for step in range(1, 13))
        assert sum(sender.sent_bytes.values()) < whole  # each share once; that of rank 0 is not among them
        assert set(ranks_of(tmp_path / "logs")) == {1, 2, 3}

    with_trainer(test)
    wait_until(lambda: not ranks_of(tmp_path / "logs"))  # none outlives the run


def test_ranks_on_two_nodes_publish_their_own_rows(with_trainer, tmp_path):
    async def test(trainer):
        alone = Driver(TorchTrainer, {**SETTINGS, "minibatches": 2, "store": MemoryStore(), "bucket_bytes": 8192})
        with ray_weights(f"rows-{os.getpid()}", slot_bytes=1 << 20) as store:
            trainer.settings |= {"store": store, "bucket_bytes": 8192}
            await trainer.start()
            for step in range(1, 5):
                alone.call(train(step))
                assert isinstance(await trainer.ask(train(step)), Trained)
                published = await trainer.ask(Publish(Version(0, step)))
                assert isinstance(published, Published), published
                manifest = published.manifest
                found = unpack(
                    manifest, [store.bucket(manifest.version, index) for index in range(len(manifest.digests))]
                )
                expected = alone.worker._snapshot()
                assert found.keys() == expected.keys()
                for name, tensor in found.items():
                    assert tensor.shape == expected[name].shape
                    assert (tensor - expected[name]).abs().max() < 1e-4
                assert {entry.shard for entry in manifest.tensors} >= set(range(RANKS))
            assert len(store.nodes_of(Version(0, 4))) > 1

    with_trainer(test)
    wait_until(lambda: not ranks_of(tmp_path / "logs"))


def test_killing_two_ranks_ends_the_worker_which_restarts_from_its_checkpoint(with_trainer, tmp_path):
    async def test(trainer):
        await trainer.start()
        await trainer.ask(train(1))
        assert await trainer.ask(Save(Version(0, 1))) == Saved(Version(0, 1))
        found = ranks_of(tmp_path / "logs")
        for rank in (2, 3):
            os.kill(found[rank], signal.SIGKILL)
        reason = await trainer.lost()
        assert re.search(r"TrainerLost: rank [23] of 4 of the trainer is lost: its process ended", reason), reason
        assert "on node 127.0.0.1" in reason
        assert "from its last checkpoint" in reason
        wait_until(lambda: not ranks_of(tmp_path / "logs"))
        info = await trainer.start(1)
        assert info.restored == Version(0, 1)
        assert isinstance(await trainer.ask(train(2)), Trained)

    with_trainer(test)


def test_killing_rank_0_ends_the_others(with_trainer, tmp_path):
    async def test(trainer):
        await trainer.start()
        found = ranks_of(tmp_path / "logs")
        assert set(found) == {1, 2, 3}
        zero = pid_of(tmp_path / "logs" / "trainer" / "0.0.log")
        os.kill(zero, signal.SIGKILL)
        await trainer.lost()
        wait_until(lambda: not any(runs(pid) for pid in found.values()))

    with_trainer(test)


def pid_of(log):
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "fd" / "1") == str(log):
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"no process writes to {log}")


def test_killing_the_node_of_ranks_ends_the_worker_and_the_rest_of_the_cluster_takes_over(
    with_trainer,
):
    async def test(trainer):
        await trainer.start()
        await trainer.ask(train(1))
        await trainer.ask(Save(Version(0, 1)))
        homes = {each.worker: each.node for each in read_workers()}
        (victim,) = set(homes.values()) - {homes["trainer/0.0"]}
        kill_raylet(victim)
        reason = await trainer.lost()
        assert re.search(r"TrainerLost: rank \d of 4 of the trainer is lost", reason), reason
        assert victim[:6] in reason
        info = await trainer.start(1)
        assert info.restored == Version(0, 1)
        assert isinstance(await trainer.ask(train(2)), Trained)

    with_trainer(test)
