"""Models of the torch engine: checkpoint folders, dtypes, and a quick start."""

import subprocess
import sys

import numpy as np
import pytest
from parts import tiny_model
from torch_engine_parts import PROMPT, add, engine, logprobs_of, same, served, training_logprobs
from transformers import GenerationConfig

from rollart.backends.models import build_model
from rollart.bench.engine import load_benches
from rollart.types.errors import RequestError


def test_a_checkpoint_folder_is_a_model_and_its_sampling_defaults_do_not_count(tmp_path):
    model = tiny_model(1)
    model.generation_config = GenerationConfig(do_sample=True, top_k=2, repetition_penalty=5.0)
    model.save_pretrained(tmp_path)
    driver = served(model=str(tmp_path))
    assert same(*driver.ask(add(1)), *served().ask(add(1)))


@pytest.mark.parametrize("shard", ["10GB", "20KB"])
def test_a_folder_can_serve_its_own_weights(tmp_path, shard):
    tiny_model(1).save_pretrained(tmp_path, max_shard_size=shard)
    driver = engine(model=str(tmp_path), serve_folder_as=(0, 1))
    assert same(*driver.ask(add(1)), *served().ask(add(1)))
    with pytest.raises(RequestError, match="serve_folder_as"):
        engine(serve_folder_as=(0, 1))


def test_a_broken_checkpoint_is_refused(tmp_path):
    tiny_model(1).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(RequestError, match="cannot be read"):
        engine(model=str(tmp_path), serve_folder_as=(0, 1))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(RequestError, match="neither"):
        engine(model=str(tmp_path), serve_folder_as=(0, 1))


def test_a_model_that_cannot_be_served():
    with pytest.raises(RequestError, match="does not support"):
        engine(model={"config": {"model_type": "mamba"}})


def test_bfloat16_generates():
    (done,) = served(dtype="bfloat16").ask(add(1, max_tokens=30))
    expected = training_logprobs(tiny_model(1), PROMPT.ids(), done.generated.tokens.ids())
    assert np.abs(logprobs_of(done.generated) - expected).mean() < 0.1


COLD = """
import sys, time
import torch
began = time.process_time()  # shared machines: CPU seconds
from rollart.backends.engines.torch_engine import TorchEngine
from rollart.types.messages import Add, Sampling
from rollart.types.tokens import Segment
engine = TorchEngine({"model": sys.argv[1], "store": None, "serve_folder_as": (0, 1)}, lambda: None)
engine.post([Add(1, 1, "t", 0, b"", Segment.of(list(range(50))), Sampling(1))])
while not (events := engine.advance(0.0).events):
    pass
assert events[0].generated.tokens.length == 1, events
assert "transformers" not in sys.modules
print(time.process_time() - began)
"""


def test_a_cold_process_gives_its_first_token_soon(tmp_path):
    build_model({"config": load_benches()["1M"].config}, dtype="float32", device="cpu").save_pretrained(tmp_path)
    done = subprocess.run([sys.executable, "-c", COLD, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 3.0
