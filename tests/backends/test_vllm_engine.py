"""What the conformance suite cannot know: that vLLM's numbers are those of a training forward, and how it fails."""

import os
import signal

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm` runs it in an environment of its own")

import psutil
import torch
from vllm_parts import ARGUMENTS, VOCABULARY, model, model_folder, publish, settings, spare_core

from rollart.backends.engines.vllm import VllmEngine, VllmEngineSettings
from rollart.backends.engines.vllm_core import Broken, VllmCore
from rollart.backends.models import token_logprobs
from rollart.backends.stores.folder import FolderStore
from rollart.backends.stores.memory import MemoryStore
from rollart.conformance.drive import WorkerDrive
from rollart.types.errors import EngineFault
from rollart.types.ids import RequestId, TrajectoryId
from rollart.types.messages import (
    Add,
    FinishReason,
    Progress,
    Refused,
    Sampling,
    Stage,
    Staged,
    TurnDone,
    Update,
    Updated,
)
from rollart.types.tokens import LOGPROB, NOTHING, Segment
from rollart.types.versions import Version

V1, V2 = Version(0, 1), Version(0, 2)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = model_folder(tmp_path_factory.mktemp("vllm") / "model")
    spare_core(folder)
    yield folder
    spare_core(folder).really_close()


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "weights")


@pytest.fixture
def drive(folder, store):
    with serving(folder, store) as drive:
        yield drive


def serving(folder, store, **changes):
    """An engine that serves v0.1."""
    options = settings(folder, store, **changes)
    drive = WorkerDrive(lambda wake: VllmEngine(options, wake, start=lambda _: spare_core(folder)), virtual=False)
    serve(drive, publish(store, V1))
    return drive


def serve(drive, manifest):
    drive.send(Stage(manifest))
    drive.until(Staged, after=len(drive.events))
    drive.send(Update(manifest.version))
    drive.until(Updated, after=len(drive.events))


def ask(drive, request=1, prompt=PROMPT, **sampling):
    options = {"max_tokens": 24, "seed": request} | sampling
    drive.send(Add(RequestId(request), TrajectoryId(request), "task", 0, b"", Segment.of(prompt), Sampling(**options)))


def answer(drive, request=1):
    """The end of a request, and all that it sampled."""
    end = drive.until(lambda event: isinstance(event, TurnDone | Refused) and event.request == request)
    whole = NOTHING
    for event in drive.events:
        if isinstance(event, Progress):
            for part, generated in event.parts:
                whole = whole.then(generated) if part == request else whole
    return (end, whole.then(end.generated)) if isinstance(end, TurnDone) else (end, whole)


def expected(seed, generated, temperature):
    """What a training forward with the weights of this seed gives for the sampled tokens."""
    ids = torch.tensor([PROMPT + generated.tokens.ids().tolist()])
    with torch.inference_mode():
        logits = model(seed)(ids).logits[0, len(PROMPT) - 1 : -1]
    return token_logprobs(logits, ids[0, len(PROMPT) :], temperature).numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
def test_log_probabilities_are_those_of_a_training_forward(drive, temperature):
    ask(drive, temperature=temperature)
    _, generated = answer(drive)
    got = np.frombuffer(generated.logprobs, dtype=LOGPROB)
    assert np.abs(got - expected(1, generated, temperature)).max() < 1e-4


def test_they_are_so_when_requests_of_different_temperatures_run_together(drive):
    temperatures = [1.0, 0.0, 0.5, 2.0]
    for index, temperature in enumerate(temperatures):
        ask(drive, index + 1, temperature=temperature)
    for index, temperature in enumerate(temperatures):
        _, generated = answer(drive, index + 1)
        got = np.frombuffer(generated.logprobs, dtype=LOGPROB)
        assert np.abs(got - expected(1, generated, temperature)).max() < 1e-4


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_a_turn_over_an_update_has_the_numbers_of_each_version(folder, store, kv_on_update):
    with serving(folder, store, kv_on_update=kv_on_update) as drive:
        manifest = publish(store, V2)
        drive.send(Stage(manifest))
        drive.until(lambda event: event == Staged(V2))
        ask(drive, max_tokens=300)
        drive.until(lambda event: isinstance(event, Progress) and event.parts)
        drive.send(Update(V2))
        end, generated = answer(drive)
    runs = generated.runs
    assert [run.version for run in runs] == [V1, V2]
    before = runs[0].length
    got = np.frombuffer(generated.logprobs, dtype=LOGPROB)
    assert np.abs(got - expected(1, generated, 1.0))[:before].max() < 1e-4
    error = np.abs(got - expected(2, generated, 1.0))[before:].max()
    if kv_on_update == "recompute":
        assert error < 1e-4
        assert end.usage.recomputed == len(PROMPT) + before - 1
    else:
        assert error > 1e-2, "kept KV is that of the older weights"
        assert end.usage.recomputed == 0


def test_the_same_seed_samples_the_same(drive):
    for request in (1, 2):
        ask(drive, request, seed=7)
    assert answer(drive, 1)[1].tokens == answer(drive, 2)[1].tokens


def test_a_stop_string_ends_the_turn_with_the_token_that_completes_it(drive):
    ask(drive, 1, max_tokens=40, seed=5)
    tokens = answer(drive, 1)[1].tokens.ids()
    string = "".join(chr(0x100 + token) for token in tokens[10:12])
    ask(drive, 2, max_tokens=40, seed=5, stop_strings=(string,))
    end, generated = answer(drive, 2)
    assert end.finish is FinishReason.STOP
    assert generated.tokens.ids().tolist() == tokens[:12].tolist()
    assert len(generated.logprobs) == 12 * LOGPROB.itemsize


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"top_p": 0.9}, "top-p"),
        ({"top_k": 5}, "top-k"),
        ({"temperature": 0.001}, "0.01"),
        ({"max_tokens": 0}, "cannot sample"),
        ({"prompt": [VOCABULARY]}, "check the codec"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(drive, wrong, why):
    ask(drive, **wrong)
    end, _ = answer(drive)
    assert isinstance(end, Refused)
    assert why in end.reason


def test_a_core_that_hangs_is_silent_and_goes_on(drive):
    cores = [child for child in psutil.Process().children(recursive=True) if "EngineCore" in child.name()]
    assert cores, "the engine core is a process of its own"
    ask(drive, max_tokens=400)
    drive.until(lambda event: isinstance(event, Progress) and event.parts)
    for core in cores:
        os.kill(core.pid, signal.SIGSTOP)
    try:
        drive.run_for(0.3)  # what was on its way arrives
        place = drive.mark()
        drive.run_for(0.6)
        assert not drive.events[place:], "nothing is reported of a core that does not answer"
    finally:
        for core in cores:
            os.kill(core.pid, signal.SIGCONT)
    end, generated = answer(drive)
    assert end.finish is FinishReason.LENGTH
    assert generated.tokens.length == 400


def test_a_broken_core_ends_the_worker(folder, store):
    worker = VllmEngine(settings(folder, store), lambda: None, start=lambda _: spare_core(folder))
    worker._on_core_event(Broken(RuntimeError("out of memory")))
    with pytest.raises(EngineFault, match=r"out of memory.*Restart the engine"):
        worker.advance(0.0)
    worker.close()


def test_an_engine_of_its_own_starts_serves_and_leaves_nothing(folder):
    before = set(psutil.Process().children(recursive=True))
    store = MemoryStore()
    options = settings(folder, store, vllm={**ARGUMENTS, "max_num_batched_tokens": 3 * len(PROMPT) + 1})
    # Less than the prompts below have, so that left to itself vLLM would compute one of them in parts.
    # Started here: on a busy machine it takes longer than the drive waits for any call.
    core = VllmCore(VllmEngineSettings.model_validate(options).vllm_arguments())
    with WorkerDrive(lambda wake: VllmEngine(options, wake, start=lambda _: core), virtual=False) as drive:
        serve(drive, publish(store, V1))
        for request in range(1, 5):
            ask(drive, request)
        for request in range(1, 5):
            end, generated = answer(drive, request)
            assert end.finish is FinishReason.LENGTH
            assert generated.tokens.length == 24
    left = set(psutil.Process().children(recursive=True)) - before
    psutil.wait_procs(left, timeout=10)
    assert not [child for child in left if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
