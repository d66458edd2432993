"""`rollart bench train`: both sides do the same work, and sequences have the stated lengths."""

import json
import statistics
import sys

import pytest
from tiny_work import MODEL_CONFIG

from rollart.bench.train import TrainBench, load_benches
from rollart.bench.train_run import Packed, Padded, draw, measure
from rollart.cli.main import main

CONFIG = MODEL_CONFIG | {"max_position_embeddings": 64}


def test_both_sides_make_the_same_step() -> None:
    samples = draw([21, 6, 33, 3], 64)
    packed, padded = Packed(CONFIG), Padded(CONFIG)
    for _ in range(3):  # the second step sees what the first made of the weights
        assert packed.step(samples) == pytest.approx(padded.step(samples), rel=1e-3)


def test_the_figures_belong_together() -> None:
    lines: list[str] = []
    result = measure(TrainBench("tiny", CONFIG, (20, 9, 30), 1), lines.append)
    assert set(result) == {"vs_padded", "tokens_per_cpu_s", "padded_tokens_per_cpu_s"}
    assert result["vs_padded"] == pytest.approx(result["tokens_per_cpu_s"] / result["padded_tokens_per_cpu_s"])
    assert len(lines) == 1


def test_a_third_of_the_tokens_are_actions_and_lengths_are_log_normal() -> None:
    benches = load_benches()
    assert list(benches) == ["1M", "10M", "50M"]
    lengths = benches["1M"].lengths
    assert max(lengths) <= 1024
    assert 200 <= statistics.median(lengths) <= 300
    samples = draw(lengths, 64)
    actions = sum(sample.sequences[0].sampled for sample in samples)
    assert actions / sum(lengths) == pytest.approx(1 / 3, abs=0.01)


def test_json_is_all_there_is_on_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = {"1M": TrainBench("1M", CONFIG, (20, 9), 1)}
    monkeypatch.setattr("rollart.bench.train.load_benches", lambda: tiny)
    for options, code in ((["--json"], 0), ([], 0), (["--model", "2M"], 2)):
        monkeypatch.setattr(sys, "argv", ["rollart", "bench", "train", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == code
        out = capsys.readouterr().out
        if "--json" in options:
            assert json.loads(out)["1M"]["vs_padded"] > 0
        else:
            assert ("vs_padded" in out) == (code == 0)
