"""`rollart doctor` tells what is there, what is missing, and what to do about it."""

import json
from importlib import metadata

import pytest
from typer.testing import CliRunner

from rollart.cli import doctor as module
from rollart.cli.main import app


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_a_machine_that_can_train():
    done = run("--json")
    assert done.exit_code == 0
    findings = json.loads(done.stdout)
    assert findings["torch"]["found"] == metadata.version("torch")
    assert findings["ports"]["mark"] == "ok"
    assert {"python", "cores", "memory", "disk"} <= findings.keys()


@pytest.mark.parametrize(("package", "code"), [("torch", 1), ("vllm", 0)])
def test_what_is_missing_and_how_to_get_it(package, code, monkeypatch):
    version = metadata.version

    def without(name):
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return "1.0" if name == "vllm" else version(name)

    monkeypatch.setattr(metadata, "version", without)
    done = run()
    assert done.exit_code == code
    (line,) = [line for line in done.stdout.splitlines() if f" {package} " in line]
    assert "missing; install it with: pip install 'rollart[" in line


def test_too_little_of_something_is_bad_and_says_the_remedy(monkeypatch):
    monkeypatch.setattr(module, "LEAST_DISK_BYTES", 10**18)
    done = run()
    assert done.exit_code == 1
    assert "--out elsewhere" in done.stdout


def test_no_compiler_is_no_trouble(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = run()
    assert done.exit_code == 0
    (line,) = [line for line in done.stdout.splitlines() if " kernels " in line]
    assert line.startswith("note")
    assert "slower than it could be" in line
    assert "no-such-compiler" in line
