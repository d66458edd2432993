"""Errors of the vLLM engine before vLLM is loaded: no model, or no vLLM, with what to install."""

import importlib.util

import pytest

from rollart.backends.engines.vllm import VllmEngine
from rollart.types.errors import RequestError


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"config\.json"):
        VllmEngine({"model": str(tmp_path), "store": None}, lambda: None)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_the_error_says_what_to_install(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RequestError, match=r"rollart\[vllm\].*make venv-vllm"):
        VllmEngine({"model": str(tmp_path), "store": None}, lambda: None)
