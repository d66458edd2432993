"""A controller on the head: workers on other nodes get its model, and send it their logs and checkpoints."""

import asyncio
import json
import os
import sys
from pathlib import Path

from travelling_worker import BIG

from rollart.backends.trainers.checkpoint import CheckpointPlace, Checkpoints
from rollart.distributed.code_travel import Code
from rollart.distributed.ray_cluster import RayCluster
from rollart.distributed.ray_files import ControllerFiles
from rollart.distributed.ray_runtime import RayRuntime
from rollart.types.ids import TrajectoryId
from rollart.types.messages import EpisodeRecord, Role, ScoreRequest
from rollart.types.placement import ACCELERATOR, Needs


def request(key, value):
    return ScoreRequest(key, "t", "travel", (EpisodeRecord(TrajectoryId(0), 0, transcript=value.encode()),))


class Listener:
    def __init__(self):
        self.joins, self.got, self.deaths, self.nodes = [], {}, {}, {}
        self.news = asyncio.Event()

    def placed(self, worker, node, why):  # noqa: ARG002 - it goes where it is sent
        self.nodes[worker] = node.split()[0]

    def joined(self, worker, info):  # noqa: ARG002 - all workers are alike
        self.joins.append(worker)
        self.news.set()

    def events(self, worker, events):
        self.got.setdefault(worker, []).extend(events)
        self.news.set()

    def died(self, worker, reason):
        self.deaths[worker] = reason
        self.news.set()

    def waits(self, worker, why):
        pass

    def leaves(self, worker, why):
        pass

    def nodes_seen(self, nodes):
        pass

    def failed(self, error):
        raise error

    async def until(self, condition):
        async with asyncio.timeout(100):
            while not condition():
                self.news.clear()
                await self.news.wait()


class Controller:
    def __init__(self, runtime, files, model):
        self.runtime, self.listener, self.model = runtime, Listener(), model
        self.place = CheckpointPlace(files.checkpoints, "run-1")
        runtime.listen(self.listener)

    async def spawn(self, worker, kind, **settings):
        needs = Needs(cpus=1, labels={ACCELERATOR: kind})
        shared = {"model": str(self.model), "codec_settings": {"folder": str(self.model)}}
        self.runtime.spawn(worker, Role.REWARD, "travelling_worker:Traveller", {**shared, **settings}, needs=needs)
        await self.listener.until(lambda: worker in self.listener.joins or worker in self.listener.deaths)
        assert worker in self.listener.joins, self.listener.deaths

    async def ask(self, worker, key, value=""):
        before = len(self.listener.got.get(worker, ()))
        self.runtime.post(worker, [request(key, value)])
        await self.listener.until(
            lambda: len(self.listener.got.get(worker, ())) > before or worker in self.listener.deaths
        )
        if worker in self.listener.deaths:
            return self.listener.deaths[worker]
        return json.loads(self.listener.got[worker][before].transcript)


async def appears(log, line):
    """Wait until the log of a worker on another node has a line."""
    async with asyncio.timeout(60):
        while not (log.is_file() and line in log.read_text()):  # noqa: ASYNC110 - a file sends no notification
            await asyncio.sleep(0.05)


async def kills(run, controller):
    logs, report = run / "logs", {}
    await controller.spawn("engine/H20/0.0", "H20")
    report["model"] = await controller.ask("engine/H20/0.0", "open")
    await controller.spawn("engine/H20/1.0", "H20")
    report["shared"] = await controller.ask("engine/H20/1.0", "open")
    await controller.ask("engine/H20/0.0", "say", "a line of a worker that lives")
    await appears(logs / "engine/H20/0.0.log", "a line of a worker that lives")
    report["crash"] = await controller.ask("engine/H20/1.0", "crash", "its last words")
    await appears(logs / "engine/H20/1.0.log", "Fatal Python error: Segmentation fault")

    await controller.spawn("trainer/0.0", "H20", checkpoints=controller.place)
    await controller.ask("trainer/0.0", "save", "0.1")
    report["saved"] = sorted(path.name for path in (run / "checkpoints").iterdir())
    report["killed"] = await controller.ask("trainer/0.0", "die", "0.2")
    await controller.spawn("trainer/0.1", "H800", checkpoints=controller.place)
    report["restored"] = await controller.ask("trainer/0.1", "save", "1.2")
    report["kept"] = sorted(path.name for path in (run / "checkpoints").iterdir())
    newest = Checkpoints(run / "checkpoints").newest()
    report["bytes"] = newest.file("model.safetensors").stat().st_size
    await controller.runtime.close()
    report["closed"] = "closing" in (logs / "trainer/0.1.log").read_text()
    report["nodes"] = controller.listener.nodes
    return report


async def saves_through_a_cut(run, controller):
    await controller.spawn("trainer/0.0", "H20", checkpoints=controller.place)
    await controller.ask("trainer/0.0", "be_cut", "0.1")
    newest = Checkpoints(run / "checkpoints").newest()
    await controller.ask("trainer/0.0", "say", "a line after the cut")
    await appears(run / "logs/trainer/0.0.log", "a line after the cut")
    await controller.runtime.close()
    return {"bytes": newest.file("model.safetensors").stat().st_size, "deaths": controller.listener.deaths}


address, scenario = sys.argv[1:]
home = Path(scenario).absolute()
model, run, code = home / "model", home / "run", home / "code"
for folder in (model, run, code):
    folder.mkdir(parents=True)
(model / "config.json").write_bytes(b"{}")
(model / "model.safetensors").write_bytes(os.urandom(BIG))
with RayCluster(address, Code(code, (), ())) as cluster:
    files = ControllerFiles(run, checkpoints=run / "checkpoints", logs=run / "logs", folders=[model])
    runtime = RayRuntime(run / "logs", local=cluster, code=cluster.code, files=files)

    async def start():
        play = {"kills": kills, "cut": saves_through_a_cut}[scenario]
        return await play(run, Controller(runtime, files, model))

    print(json.dumps(asyncio.run(start())))  # noqa: T201 - read by the test
