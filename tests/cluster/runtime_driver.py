"""A controller with nothing but a runtime, for tests: `runtime_driver.py <address of the cluster>`.

Takes commands from standard input, one line of JSON each, and writes what the listener hears to standard output.

    {"spawn": worker, "labels": {…}, "fallback": [{…}]}
    {"stream": true}    from now on every worker gets numbered messages, which it returns
    {"report": true}    ends the stream, waits for all answers of the living and prints what came back
"""

import asyncio
import json
import sys
import threading
from pathlib import Path

from echo import ECHO, message
from msgspec import convert

from rollart.distributed.code_travel import Code
from rollart.distributed.ray_cluster import RayCluster
from rollart.distributed.ray_runtime import RayRuntime
from rollart.types.messages import Role
from rollart.types.placement import Needs

PAUSE_S = 0.02


def say(**what):
    print(json.dumps(what), flush=True)  # noqa: T201


class Talker:
    """Listener that prints, and keeps the numbers that came back."""

    def __init__(self):
        self.living, self.sent, self.received = [], {}, {}

    def waits(self, worker, why):
        say(waits=worker, why=why)

    def placed(self, worker, node, why):
        say(placed=worker, node=node, why=why)

    def joined(self, worker, info):  # noqa: ARG002 - all workers are alike
        self.living.append(worker)
        self.sent[worker], self.received[worker] = 0, []
        say(joined=worker)

    def events(self, worker, events):
        self.received[worker] += [int(event.transcript) for event in events]

    def died(self, worker, reason):
        if worker in self.living:
            self.living.remove(worker)
        say(died=worker, reason=reason)

    def leaves(self, worker, why):
        say(leaves=worker, why=why)

    def nodes_seen(self, nodes):
        pass

    def failed(self, error):
        say(failed=str(error))


async def main(address):
    loop, commands = asyncio.get_running_loop(), asyncio.Queue()

    def read():
        for line in sys.stdin:
            loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))

    threading.Thread(target=read, daemon=True).start()
    runtime, talker = RayRuntime(Path("/tmp/logs"), local=cluster, code=cluster.code), Talker()
    runtime.listen(talker)
    streaming = None
    say(connected=address)
    while True:
        match await commands.get():
            case {"spawn": worker, **needs}:
                runtime.spawn(worker, Role.REWARD, ECHO, {}, needs=convert(needs, Needs))
            case {"stream": _}:
                streaming = loop.create_task(stream(runtime, talker))
            case {"report": _}:
                streaming.cancel()
                await answered(talker)
                lists = {worker: (talker.sent[worker], talker.received[worker]) for worker in talker.living}
                say(report={worker: [sent, got == list(range(sent))] for worker, (sent, got) in lists.items()})
            case {"end": _}:
                await runtime.close()
                return


async def stream(runtime, talker):
    while True:
        for worker in talker.living:
            runtime.post(worker, [message(talker.sent[worker])])
            talker.sent[worker] += 1
        await asyncio.sleep(PAUSE_S)


async def answered(talker):
    async with asyncio.timeout(60):
        while any(len(talker.received[worker]) < talker.sent[worker] for worker in talker.living):  # noqa: ASYNC110
            await asyncio.sleep(PAUSE_S)


if __name__ == "__main__":
    with RayCluster(sys.argv[1], Code(Path.cwd(), (), ())) as cluster:
        asyncio.run(main(sys.argv[1]))
