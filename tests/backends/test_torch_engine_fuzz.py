"""Random commands against the torch engine, and a controller that knows what must come of them.

Every sampled token is checked against a plain forward of its version on its own context: what a request gets is what it
would have got alone. Where the two likeliest tokens are closer than rounding, either is right.
"""

import random

import msgspec
import numpy as np
import pytest
import torch
from parts import PATIENCE_S, TINY, VOCABULARY, Driver, publish, tiny_model

from rollart.backends.engines.torch_engine import TorchEngine
from rollart.backends.stores.memory import MemoryStore
from rollart.types.messages import (
    Abort,
    Add,
    EndSession,
    FinishReason,
    PrefixMiss,
    Progress,
    Refused,
    Resume,
    Sampling,
    Stage,
    Staged,
    StageFailed,
    Suspend,
    TurnDone,
    Update,
    Updated,
)
from rollart.types.tokens import NOTHING, Segment, TokenSequence
from rollart.types.versions import Version

TOKEN_MIB = 2 * 2 * 16 * 4 / 2**20
ACTIONS = 120
CLOSE = 1e-4


class Asked(msgspec.Struct):
    """A request and what came of it."""

    add: Add
    context: bytes
    generated: object = NOTHING
    end: object = None


class Controller:
    """Sends random commands and checks every answer."""

    def __init__(self, seed, *, keep):
        self.random = random.Random(seed)
        self.keep = keep
        self.max_context = self.random.choice([48, 90, 128])
        self.store = MemoryStore()
        settings = {
            "model": TINY,
            "store": self.store,
            "slots": self.random.choice([1, 3, 8]),
            "max_context": self.max_context,
            "kv_mib": self.random.choice([self.max_context, 200, 400, 2000]) * TOKEN_MIB,
            "prefill_tokens": self.random.choice([1, 5, 17, 64]),
            "kv_on_update": "keep" if keep else "recompute",
            "progress_interval_s": self.random.choice([1e-6, 0.01, 5.0]),
        }
        self.driver = Driver(TorchEngine, settings)
        self.max_context = self.driver.worker.info().max_context
        self.max_tokens = max(2, self.max_context // 3)
        self.prompts = [self.tokens(self.random.randint(2, self.max_context // 2)) for _ in range(3)]
        self.sessions = {}
        self.asked = {}
        self.requests = 0
        self.version = None
        self.published = 0
        self.staged = []
        self.models = {}
        self.stage(corrupt=False)
        self.settle()
        self.update()
        self.settle()

    # --- commands

    def tokens(self, count):
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def act(self):
        actions = [self.new_session] * 4 + [self.next_turn] * 6 + [self.some_slices] * 8 + [self.abort, self.end]
        actions += [self.double, self.forged, self.suspend, self.resume, self.resume, self.stage, self.update]
        self.random.choice(actions)()

    def new_session(self):
        prompt = list(self.random.choice(self.prompts))
        prompt = prompt[: self.random.randint(1, len(prompt))] if self.random.random() < 0.3 else prompt
        prompt += self.tokens(self.random.choice([0, 0, 3]))
        number = (
            self.random.choice([*self.sessions, *range(100)]) if self.random.random() < 0.1 else len(self.asked) + 1000
        )
        log = self.sessions[number] = TokenSequence()
        log.append_context(Segment.of(prompt))
        self.ask(number, whole=True)

    def next_turn(self):
        if self.sessions:
            number = self.random.choice(list(self.sessions))
            self.sessions[number].append_context(Segment.of(self.tokens(self.random.randint(0, 6))))
            self.ask(number, whole=self.random.random() < 0.1)

    def ask(self, number, *, whole):
        log = self.sessions[number]
        self.requests += 1
        whole = whole or not log.turn_length
        sampling = Sampling(self.random.randint(1, self.max_tokens), 0.0)
        if self.random.random() < 0.2:
            sampling = msgspec.structs.replace(sampling, stop_tokens=tuple(self.tokens(20)))
        add = Add(
            request=self.requests,
            session=number,
            task=self.random.choice("ab"),
            prefix_length=0 if whole else log.turn_length,
            prefix_digest=b"" if whole else log.turn_digest,
            new=log.whole() if whole else log.since_turn(),
            sampling=sampling,
        )
        self.asked[add.request] = Asked(add, log.whole().payload)
        self.driver.send(add)

    def open_requests(self):
        return [request for request, asked in self.asked.items() if asked.end is None]

    def abort(self):
        if self.open_requests():
            self.driver.send(Abort(self.random.choice(self.open_requests())))

    def end(self):
        if self.sessions:
            number = self.random.choice(list(self.sessions))
            del self.sessions[number]
            self.driver.send(EndSession(number))

    def double(self):
        ended = [asked.add for asked in self.asked.values() if isinstance(asked.end, TurnDone)]
        waiting = [self.asked[request].add for request in self.open_requests()]
        if ended + waiting:
            self.driver.send(self.random.choice(ended + waiting))

    def forged(self):
        """A prefix that the session does not hold."""
        if self.sessions:
            number = self.random.choice(list(self.sessions))
            self.requests += 1
            add = Add(self.requests, number, "a", 3, b"nothing like it", Segment.of([1]), Sampling(2, 0.0))
            self.asked[add.request] = Asked(add, b"")
            self.driver.send(add)

    def suspend(self):
        self.driver.send(Suspend())

    def resume(self):
        self.driver.send(Resume())

    def stage(self, corrupt=None):
        self.published += 1
        version = Version(0, self.published)
        manifest = publish(self.store, version)
        self.models[version] = tiny_model(version.step)
        if self.random.random() < 0.3 if corrupt is None else corrupt:
            manifest = msgspec.structs.replace(manifest, digests=tuple("0" for _ in manifest.digests))
        self.driver.send(Stage(manifest))

    def update(self):
        if self.staged:
            self.driver.send(Update(self.staged.pop(0)))

    def some_slices(self):
        for _ in range(self.random.randint(1, 12)):
            self.slice()

    # --- answers

    def slice(self):
        wake_at = self.driver.slice()
        self.driver.worker.check()
        for event in self.driver.take():
            self.handle(event)
        return wake_at

    def settle(self):
        """Until nothing is left to do, in threads neither."""
        while True:
            self.driver.woken.clear()
            if self.slice() is None:
                if not self.driver.staging:
                    return
                assert self.driver.woken.wait(PATIENCE_S)

    def handle(self, event):
        match event:
            case Progress(parts):
                for request, part in parts:
                    asked = self.asked[request]
                    assert asked.end is None
                    asked.generated = asked.generated.then(part)
            case TurnDone(request, generated, finish):
                asked = self.asked[request]
                assert asked.end is None
                asked.end = event
                asked.generated = asked.generated.then(generated)
                self.check_turn(asked, finish)
            case PrefixMiss(request) | Refused(request):
                asked = self.asked[request]
                if asked.end == event:
                    return  # doubled before it was answered: what was not served is not remembered
                assert asked.end is None
                asked.end = event
                if isinstance(event, Refused):
                    length = len(asked.context) // 4
                    assert length >= self.max_context or asked.add.prefix_length + asked.add.new.length == 0
                    self.sessions.pop(asked.add.session, None)
                elif asked.context and asked.add.session in self.sessions:
                    self.ask(asked.add.session, whole=True)
            case Staged(version):
                self.staged.append(version)
            case Updated(version):
                assert self.version is None or version >= self.version
                self.version = version
            case StageFailed():
                pass

    def check_turn(self, asked, finish):
        add, generated = asked.add, asked.generated
        tokens = generated.tokens.ids()
        log = self.sessions.get(add.session)
        if log is not None and log.whole().payload == asked.context:
            log.append_sampled(generated)
        assert sum(run.length for run in generated.runs) == len(tokens)
        assert len(tokens) <= add.sampling.max_tokens
        stops = [token in add.sampling.stop_tokens for token in tokens]
        assert not any(stops[:-1])
        if finish is FinishReason.STOP:
            assert stops[-1]
        elif finish is FinishReason.LENGTH:
            full = len(asked.context) // 4 + len(tokens) == self.max_context
            assert full or len(tokens) == add.sampling.max_tokens
        usage, prompt = asked.end.usage, len(asked.context) // 4
        assert usage.prefilled + usage.cached <= prompt
        if len(tokens):
            assert usage.prefilled + usage.cached + usage.recomputed >= prompt
            self.check_tokens(asked.context, generated)

    def check_tokens(self, context, generated):
        """Each token is the likeliest of its version on its context, and has that version's log-probability."""
        if self.keep and len(self.models) > 1:
            return  # KV of an older version is kept on purpose
        tokens = generated.tokens.ids()
        logprobs = np.frombuffer(generated.logprobs, dtype="<f4")
        ids = torch.from_numpy(np.concatenate([np.frombuffer(context, dtype="<i4"), tokens])).long()
        start = 0
        for run in generated.runs:
            with torch.no_grad():
                logits = self.models[run.version](ids[None, :-1]).logits[0, -len(tokens) :]
            for index in range(start, start + run.length):
                assert logits[index].max() - logits[index, tokens[index]] < CLOSE
                want = torch.log_softmax(logits[index], -1)[tokens[index]]
                assert abs(float(want) - logprobs[index]) < CLOSE
            start += run.length


@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("seed", range(12))
def test_any_commands_in_any_order(seed, keep):
    controller = Controller(seed, keep=keep)
    for _ in range(ACTIONS):
        controller.act()
    controller.resume()
    controller.settle()
    assert not controller.open_requests(), "every request is answered"
    assert any(isinstance(asked.end, TurnDone) for asked in controller.asked.values())
    for number in list(controller.sessions) + [asked.add.session for asked in controller.asked.values()]:
        controller.driver.send(EndSession(number))
    controller.settle()
    assert controller.driver.worker.kv_tokens_used == 0, "no block is leaked"
