"""Packages in clean virtual environments, installed by pip: the real servers of their targets, and schemathesis."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from served_function import PATIENCE_S, SECRET, call, request, transcript, write_functions
from test_function_package import check_answers, invoke

from rollart.app.functions.package import Target, package

pytestmark = pytest.mark.long
SCHEMATHESIS = "schemathesis==4.32.5"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "unsupported_method,ignored_auth"
)


def environment(folder: Path, *requirements: str) -> Path:
    """Folder with the commands of a new environment."""
    venv.EnvBuilder(with_pip=True).create(folder)
    if not requirements:
        return folder / "bin"
    install = [folder / "bin" / "python", "-m", "pip", "-q", "--disable-pip-version-check", "install", *requirements]
    done = subprocess.run(install, capture_output=True, text=True, timeout=800, check=False)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip(f"no package index has what is needed: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def installed(tmp_path: Path, target: Target, name: str = "correct") -> tuple[Path, Path]:
    """A package moved away from where it was made, and the commands of an environment with its requirements."""
    package(f"{write_functions(tmp_path)}:{name}", target, tmp_path / "made")
    folder = Path(shutil.move(tmp_path / "made", tmp_path / "deployed"))
    (tmp_path / "served_rewards.py").unlink()
    return folder, environment(tmp_path / "env", "-r", str(folder / "requirements.txt"))


@contextmanager
def serving(folder: Path, *command: str | Path, secret: str = SECRET) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"PATH": os.environ["PATH"], "ROLLART_REWARD_SECRET": secret, "PYTHONDONTWRITEBYTECODE": "1"}
    with (folder.parent / "server.log").open("w+") as log:
        process = subprocess.Popen(
            [*map(str, command), "--port", str(port), "--host", "127.0.0.1"],
            cwd=folder,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + PATIENCE_S
            while get(f"{url}/health")[0] != 200:
                assert process.poll() is None, (folder.parent / "server.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def get(url: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Status and body; 0 while nothing listens."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=PATIENCE_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError:
        return 0, b""


def check_server(url: str) -> None:
    status, body = get(url, request(call(1), call(2, transcript(2, "no"))), Authorization=f"Bearer {SECRET}")
    assert status == 200, body
    assert [each["values"] for each in json.loads(body)["answers"]] == [[1.0], [0.0]]
    assert get(url, request())[0] == 401
    assert get(url, b"{", Authorization=f"Bearer {SECRET}")[0] == 422
    assert get(url)[0] == 405
    assert json.loads(get(f"{url}/openapi.json")[1])["openapi"] == "3.1.0"


def test_functions_framework(tmp_path):
    folder, commands = installed(tmp_path, Target.FUNCTIONS_FRAMEWORK)
    with serving(folder, commands / "functions-framework", "--target", "score") as url:
        check_server(url)
        assert json.loads(get(f"{url}/health")[1]) == {"status": "ok"}


def test_lambda(tmp_path):
    folder, commands = installed(tmp_path, Target.LAMBDA)
    check_answers(invoke(folder, [str(commands / "python")], ""))


def test_lambda_as_its_readme_builds_it(tmp_path):
    """The archive, unpacked elsewhere, needs nothing but Python."""
    package(f"{write_functions(tmp_path)}:correct", Target.LAMBDA, tmp_path / "made" / "package")
    (build,) = re.findall(r"## Build\n\n```\n(.*?)```", (tmp_path / "made" / "package" / "README.md").read_text(), re.S)
    commands = environment(tmp_path / "env")
    path = f"{commands}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-ec", build],
        cwd=tmp_path / "made" / "package",
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "made" / "correct.zip") as archive:
        archive.extractall(tmp_path / "task")
    check_answers(invoke(tmp_path / "task", [sys.executable, "-S"], str(tmp_path / "task")))


@pytest.mark.parametrize("name", ["correct", "longest"])
def test_asgi_with_schemathesis(tmp_path, name):
    folder, commands = installed(tmp_path, Target.ASGI, name)
    tools = environment(tmp_path / "tools", SCHEMATHESIS)
    with serving(folder, commands / "uvicorn", "main:app") as url:
        if name == "correct":
            check_server(url)
        command = [tools / "schemathesis", "run", f"{url}/openapi.json", "-H", f"Authorization: Bearer {SECRET}"]
        options = ["--checks", CHECKS, "--max-examples", "100", "--no-color"]
        done = subprocess.run(
            [*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False
        )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "Tested: 2" in done.stdout or "Tested: 3" in done.stdout, done.stdout[-2000:]
