"""An engine worker that does what a test says, a served model without weights, and calls of the application."""

import asyncio
import json
import threading
from collections import deque

from rollart.app.serving.engine import ServingEngine
from rollart.app.serving.model import ServedModel
from rollart.backends.engines.checkpoint_config import read_shape
from rollart.backends.environments.codec import ByteCodec
from rollart.backends.environments.conversation import CodecConversations
from rollart.distributed.inline import InlineRuntime
from rollart.ports.worker import Advance
from rollart.types.messages import EngineInfo, FinishReason, Progress, TurnDone, TurnUsage
from rollart.types.tokens import LOGPROB, Generated, Segment, VersionRun
from rollart.types.versions import Version

KEY = "a-key-for-tests"
PATIENCE_S = 100.0
CONTEXT = 64


class Script:
    """What the engine was sent, and what it shall report; shared by the test and the engine's thread."""

    def __init__(self):
        self.changed = threading.Condition()
        self.commands = []
        self.events = deque()
        self.error = None
        self.wake = None

    def report(self, *events):
        with self.changed:
            self.events += events
        self.wake()

    def die(self, error):
        with self.changed:
            self.error = error
        self.wake()

    def progress(self, request, text):
        self.report(Progress(((request, sampled(text)),), 1))

    def done(self, request, text="", finish=FinishReason.STOP, cached=0):
        self.report(TurnDone(request, sampled(text), finish, TurnUsage(0, cached, 0)))

    async def sent(self, kind, count=1):
        """The first `count` commands of a kind, when they have come."""

        def found():
            return [command for command in self.commands if isinstance(command, kind)]

        def wait():
            with self.changed:
                assert self.changed.wait_for(lambda: len(found()) >= count, PATIENCE_S), self.commands
                return found()

        return await asyncio.to_thread(wait)


def sampled(text):
    """Bytes as tokens; the n-th has the log-probability -n."""
    ids = list(text.encode())
    logprobs = [-float(number) for number, _ in enumerate(ids, start=1)]
    runs = (VersionRun(Version(0, 0), len(ids)),) if ids else ()
    return Generated(Segment.of(ids), b"".join(LOGPROB.type(each).tobytes() for each in logprobs), runs)


class ScriptedEngine:
    def __init__(self, settings, wake):
        if settings.get("broken"):
            raise ValueError("no such weights")
        self._script = settings["script"]
        self._script.wake = wake

    def info(self):
        return EngineInfo(slots=2, max_context=CONTEXT)

    def post(self, commands):
        with self._script.changed:
            self._script.commands += commands
            self._script.changed.notify_all()

    def advance(self, now):  # noqa: ARG002
        with self._script.changed:
            if self._script.error is not None:
                raise self._script.error
            events = list(self._script.events)
            self._script.events.clear()
            return Advance(events, None)

    def close(self):
        pass


def engine(script, *, queue=1, **settings):
    """Two turns run, and `queue` wait."""
    settings = {"script": script, **settings}
    return ServingEngine(InlineRuntime(), settings, queue=queue, factory=f"{__name__}:ScriptedEngine")


def served():
    shape = read_shape({"config": {"vocab_size": 260, "num_hidden_layers": 1}})
    return ServedModel(None, "tiny", shape, CodecConversations(ByteCodec()))


class Call:
    """A request to an ASGI application: its body comes, and its answer is seen, when the test wants."""

    def __init__(self, app, method, path, *, headers=(), key=KEY):
        fields = [(b"authorization", f"Bearer {key}".encode())] if key else []
        fields += [(name.lower().encode(), value.encode()) for name, value in headers]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": fields,
        }
        self._incoming = asyncio.Queue()
        self._outgoing = asyncio.Queue()
        self.read = 0
        self.task = asyncio.create_task(app(scope, self._receive, self._outgoing.put))

    async def _receive(self):
        message = await self._incoming.get()
        self.read += 1
        return message

    def send(self, body=b"", *, more=False):
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self):
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def start(self):
        """Status and headers."""
        async with asyncio.timeout(PATIENCE_S):
            message = await self._outgoing.get()
        assert message["type"] == "http.response.start"
        return message["status"], {name.decode(): value.decode() for name, value in message["headers"]}

    async def part(self):
        async with asyncio.timeout(PATIENCE_S):
            message = await self._outgoing.get()
        return message["body"], message.get("more_body", False)

    async def body(self):
        whole, more = b"", True
        while more:
            part, more = await self.part()
            whole += part
        await self.task
        return whole

    async def answer(self):
        status, headers = await self.start()
        return status, headers, await self.body()


def post(app, path, body, **options):
    """A request with its whole body."""
    call = Call(app, "POST", path, **options)
    call.send(body if isinstance(body, bytes) else json.dumps(body).encode())
    return call


def chat(app, *, path="/v1/chat/completions", key=KEY, **fields):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16, **fields}
    return post(app, path, body, key=key)
