"""Interpreters of workers: which ones are refused, and what to do about it."""

import json
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from other_python import other_python

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

import rollart
from rollart.distributed.interpreter import check_interpreter
from rollart.ports.import_paths import project_paths
from rollart.types.errors import RequestError

OURS = {
    "python": list(sys.version_info[:2]),
    "ray": version("ray"),
    "rollart": rollart.__version__,
    "problem": "",
    "missing": [],
}


def script(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def answering(folder: Path, **changes: object) -> str:
    """An interpreter that describes itself as this one, but for the changes."""
    return script(folder, f"echo {shlex.quote(json.dumps(OURS | changes))}")


def test_another_environment_with_the_same_versions_will_do(tmp_path: Path) -> None:
    check_interpreter(sys.executable)
    check_interpreter(other_python(tmp_path / "other"), "json")
    check_interpreter(answering(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"python": [3, 9]}, ("Python 3.9", f"runs with {sys.version_info[0]}.{sys.version_info[1]}")),
        ({"ray": "2.59.0"}, ("Ray 2.59.0", f"pip install ray=={OURS['ray']}")),
        ({"ray": "", "problem": "no Ray"}, ("has no Ray", f"pip install ray=={OURS['ray']}")),
        ({"rollart": "", "problem": "No module named 'rollart'"}, ("cannot import rollart", "pip install --no-deps ")),
        ({"rollart": "0.0.1"}, ("rollart 0.0.1", "pip install --no-deps ")),
        ({"problem": "No module named 'msgspec'"}, ("No module named 'msgspec'", "install what is missing")),
        ({"missing": ["vllm"]}, ("has no vllm",)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_one_that_differs_is_refused_with_the_remedy(
    tmp_path: Path, changes: dict[str, object], words: tuple[str, ...]
) -> None:
    python = answering(tmp_path, **changes)
    with pytest.raises(RequestError) as refused:
        check_interpreter(python)
    for word in (python, *words):
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [("exit 0", "its output: nothing"), ("echo no >&2; exit 1", "its output: no"), ("echo [", "nothing")],
)
def test_what_is_no_interpreter_is_refused(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(RequestError, match=f"does not run as a Python interpreter.*{word}"):
        check_interpreter(script(tmp_path, text))


def test_an_environment_without_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = other_python(tmp_path / "other", packages=False)
    with pytest.raises(RequestError, match="has no Ray"):
        check_interpreter(python)


def test_packages_of_the_controller_stay_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = project_paths()
    assert str(tmp_path) in paths
    assert set(paths) < set(sys.path)
    assert not [path for path in paths if "site-packages" in path or path in (json.__file__, "lib-dynload")]
    assert str(Path(json.__file__).parents[1]) not in paths
