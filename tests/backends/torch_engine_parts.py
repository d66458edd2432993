"""A torch engine on a tiny model, requests for it, and what it must return."""

import msgspec
import numpy as np
import torch
from parts import TINY, V1, Driver, publish

from rollart.backends.engines.torch_engine import TorchEngine
from rollart.backends.models import token_logprobs
from rollart.backends.stores.memory import MemoryStore
from rollart.types.messages import Add, Sampling, Stage, Update, Updated
from rollart.types.tokens import Segment, prefix_digest

PROMPT = Segment.of(list(range(40, 60)))
TOKEN_MIB = 2 * 2 * 16 * 4 / 2**20
"""KV of one token of the tiny model."""


def engine(store=None, **settings):
    store = store or MemoryStore()
    options = {"model": TINY, "store": store, "max_context": 128, "kv_mib": 1.0, "slots": 8, "progress_interval_s": 1e3}
    driver = Driver(TorchEngine, options | settings)
    driver.store = store
    return driver


def serve(driver, version):
    driver.ask(Stage(publish(driver.store, version)))
    assert driver.ask(Update(version))[-1] == Updated(version)


def served(version=V1, **settings):
    driver = engine(**settings)
    serve(driver, version)
    return driver


def add(request, new=PROMPT, *, session=None, prefix=b"", max_tokens=12, task="t", **sampling):
    return Add(
        request=request,
        session=request if session is None else session,
        task=task,
        prefix_length=len(prefix) // 4,
        prefix_digest=prefix_digest(prefix) if prefix else b"",
        new=new,
        sampling=Sampling(max_tokens, **{"seed": 7, **sampling}),
    )


def logprobs_of(generated):
    return np.frombuffer(generated.logprobs, dtype="<f4")


def training_logprobs(model, context, tokens, temperature=1.0):
    ids = torch.tensor(np.concatenate([context, tokens])).long()
    with torch.no_grad():
        logits = model(ids[None, :-1]).logits[0]
    return token_logprobs(logits, ids[1:], temperature)[-len(tokens) :].numpy()


def check_logprobs(model, context, generated, temperature=1.0):
    expected = training_logprobs(model, context, generated.tokens.ids(), temperature)
    np.testing.assert_allclose(logprobs_of(generated), expected, atol=1e-4)


def same(first, second):
    """The same turn, but for the last bits of its log-probabilities: products round by where memory lies."""
    np.testing.assert_allclose(logprobs_of(first.generated), logprobs_of(second.generated), atol=1e-4)
    blank = msgspec.structs.replace(first.generated, logprobs=second.generated.logprobs)
    return msgspec.structs.replace(first, generated=blank) == second
