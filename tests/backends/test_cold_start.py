import json

import numpy as np
import pytest
import torch
from parts import TINY, Driver
from transformers import AutoModelForCausalLM

from rollart.backends.engines.torch_engine import TorchEngine
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.trainers import checkpoint
from rollart.backends.trainers import cold_start as module
from rollart.backends.trainers.cold_start import ColdStartSettings, cold_start
from rollart.backends.trainers.torch_trainer import TorchTrainer
from rollart.types.errors import RequestError
from rollart.types.messages import Add, Sampling, TurnDone
from rollart.types.tokens import Segment

STOP = 9
BESIDE = {"tokenizer_config.json": b"{}"}


def parrot(count=400, seed=0):
    """Two turns: the answer is the last token observed, raised by 20, and the stop token. What is observed is noise."""
    rng = np.random.default_rng(seed)
    return [
        [(observed := rng.integers(10, 20, 3).tolist(), [observed[-1] + 20, STOP]) for _ in range(2)]
        for _ in range(count)
    ]


def settings(**changes):
    return ColdStartSettings(**{"model": TINY, "steps": 120, "batch_tokens": 200, "learning_rate": 1e-2} | changes)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cold") / "model"
    return folder, cold_start(settings(observation_weight=0.0), parrot(), folder, BESIDE)


def test_it_learns_to_answer(learned):
    folder, loss = learned
    assert loss < 0.5
    engine = Driver(TorchEngine, {"model": str(folder), "store": MemoryStore(), "serve_folder_as": (0, 0)})
    right = 0
    for request, [(observed, answer), _] in enumerate(parrot(20, seed=1)):
        sampling = Sampling(4, stop_tokens=(STOP,), seed=request)
        engine.send(Add(request, request, "t", 0, b"", Segment.of(observed), sampling))
        (done,) = [event for event in engine.rest() if isinstance(event, TurnDone)]
        right += done.generated.tokens.ids().tolist() == answer
    assert right > 14


def test_it_uses_several_cores_and_leaves_one_thread_to_whoever_comes_next(tmp_path, monkeypatch):
    """Workers have one thread each; a cold start is alone on the machine."""
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr(module, "REPORTED_STEPS", 1)
    threads, one = [], settings(steps=1)
    cold_start(one, parrot(20), tmp_path / "model", BESIDE, lambda *_: threads.append(torch.get_num_threads()))
    assert (threads, torch.get_num_threads()) == ([3], 1)


def chances(folder, tokens):
    """Probabilities of every token after each prefix of `tokens`."""
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([tokens])).logits[0].softmax(-1)


def test_observations_of_no_weight_are_not_learned(learned):
    """Inside an observation the model knows only answers: the rest was never trained on."""
    (observed, _), _ = parrot(1)[0]
    found = chances(learned[0], observed)
    assert found[:, 30:40].sum(-1).min() > 0.5
    assert found[:, 10:20].sum(-1).max() < 0.1


def test_what_follows_an_answer_is_learned_and_a_prompt_never(tmp_path):
    prompt, folder = [20, 21, 22], tmp_path / "model"
    transcripts = [[(prompt, answer), later] for [(_, answer), later] in parrot()]
    cold_start(settings(), transcripts, folder, BESIDE)
    (_, answer), (later, _) = transcripts[0]
    found = chances(folder, [*prompt, *answer, *later])
    assert found[len(prompt) + len(answer) - 1, 10:20].sum() > 0.9
    assert found[: len(prompt) - 1, 20:23].sum(-1).max() < 0.1


def test_the_folder_is_a_checkpoint(learned):
    folder, _ = learned
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer_config.json",
    ]
    assert (folder / "tokenizer_config.json").read_bytes() == b"{}"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    trainer = TorchTrainer({"model": str(folder), "store": MemoryStore(), "temperature": 1.0}, lambda: None)
    assert trainer.info().parameters > 0
    trainer.close()


def test_the_same_seed_gives_the_same_weights(tmp_path):
    weights = []
    for number, seed in enumerate((0, 0, 1)):
        cold_start(settings(seed=seed, steps=4), parrot(), tmp_path / str(number), BESIDE)
        weights.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_a_folder_that_is_there_is_not_written_over(tmp_path):
    with pytest.raises(RequestError, match="already exists"):
        cold_start(settings(), parrot(), tmp_path, BESIDE)


def test_nothing_to_learn_is_refused(tmp_path):
    with pytest.raises(RequestError, match="there are none"):
        cold_start(settings(), [], tmp_path / "model", BESIDE)


def test_the_folder_is_whole_or_not_there(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    write = checkpoint.write_file

    def full(path, data):
        if path.suffix == ".safetensors":
            raise OSError("no space left")
        write(path, data)

    monkeypatch.setattr(checkpoint, "write_file", full)
    with pytest.raises(OSError, match="no space"):
        cold_start(settings(steps=1), parrot(), folder, BESIDE)
    assert not folder.exists()
    monkeypatch.undo()
    cold_start(settings(steps=1), parrot(), folder, BESIDE)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
