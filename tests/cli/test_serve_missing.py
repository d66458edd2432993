"""`rollart serve` without what it needs."""

import importlib.util

import pytest
from test_commands import Command, rollart  # noqa: F401 - a fixture

from rollart.cli import serve


def test_missing_packages_are_named_with_the_extra(rollart: Command, monkeypatch: pytest.MonkeyPatch, tmp_path):  # noqa: F811
    found = importlib.util.find_spec
    monkeypatch.setattr(
        serve.importlib.util, "find_spec", lambda name: None if name in ("uvicorn", "starlette") else found(name)
    )
    done = rollart("serve", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "serving needs uvicorn, starlette" in done.err
    assert "pip install 'rollart[serve]'" in done.err
