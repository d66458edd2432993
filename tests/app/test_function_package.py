"""Packaged functions: what is in the folder, and that it runs without anything else but what it pins."""

import base64
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from served_function import PATIENCE_S, SECRET, call, request, transcript, write_functions

from rollart.app.functions import closure, packaged
from rollart.app.functions.closure import needs_of
from rollart.app.functions.package import Target, package
from rollart.ports import factory
from rollart.types.errors import RequestError


def url_event(body: bytes, *, secret: str = SECRET, as_base64: bool = False, method: str = "POST") -> dict:
    """An event of a function URL, payload format 2.0, as AWS documents it."""
    return {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": "/",
        "rawQueryString": "",
        "headers": {
            "authorization": f"Bearer {secret}",
            "content-length": str(len(body)),
            "content-type": "application/json",
            "host": "abcdefg.lambda-url.eu-central-1.on.aws",
            "x-amzn-trace-id": "Root=1-5e66d96f-7491f09xmpl79d18acf3d050",
            "x-forwarded-for": "192.0.2.1",
            "x-forwarded-port": "443",
            "x-forwarded-proto": "https",
        },
        "requestContext": {
            "accountId": "anonymous",
            "apiId": "abcdefg",
            "domainName": "abcdefg.lambda-url.eu-central-1.on.aws",
            "domainPrefix": "abcdefg",
            "http": {
                "method": method,
                "path": "/",
                "protocol": "HTTP/1.1",
                "sourceIp": "192.0.2.1",
                "userAgent": "rollart",
            },
            "requestId": "e1506fd5-9e7b-434f-bd42-4f8fa224b599",
            "routeKey": "$default",
            "stage": "$default",
            "time": "12/Mar/2026:19:03:58 +0000",
            "timeEpoch": 1583348638390,
        },
        "body": base64.b64encode(body).decode() if as_base64 else body.decode(),
        "isBase64Encoded": as_base64,
    }


LAMBDA = """
import json, sys
from lambda_function import lambda_handler

class Context:
    def get_remaining_time_in_millis(self):
        return 300_000

for line in sys.stdin:
    print(json.dumps(lambda_handler(json.loads(line), Context())), flush=True)
heavy = {"numpy", "pydantic", "torch", "ray", "typer", "rich", "starlette"}
assert not heavy & {name.partition(".")[0] for name in sys.modules}
"""
EVENTS = [
    url_event(request()),
    url_event(request(), as_base64=True),
    url_event(request(), secret="wrong"),
    url_event(b"", method="GET"),
    url_event(b"{") | {"body": "%%%", "isBase64Encoded": True},
    json.loads(request(call(2), call(3, transcript(3, "no")))),
    {"calls": []},
    [],
]


def invoke(folder: Path, python: list[str], path: str) -> list[dict]:
    """What the handler in this folder answers to `EVENTS`."""
    done = subprocess.run(
        [*python, "-c", LAMBDA],
        cwd=folder,
        env={"ROLLART_REWARD_SECRET": SECRET, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        input="".join(json.dumps(event) + "\n" for event in EVENTS),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_answers(answers: list[dict]) -> None:
    plain, encoded, stranger, wrong_method, damaged, direct, empty, no_object = answers
    for answer in (plain, encoded):
        assert (answer["statusCode"], answer["isBase64Encoded"]) == (200, False)
        assert json.loads(answer["body"])["answers"][0]["values"] == [1.0]
    codes = [answer["statusCode"] for answer in (stranger, wrong_method, damaged)]
    assert codes == [401, 405, 422]
    assert [each["values"] for each in direct["answers"]] == [[1.0], [0.0]]
    assert empty["status"] == no_object["status"] == 422


def test_a_lambda_package_runs_with_nothing_but_msgspec(tmp_path):
    function = f"{write_functions(tmp_path)}:correct"
    written = package(function, Target.LAMBDA, tmp_path / "out")
    assert written.requirements == (f"msgspec=={msgspec.__version__}",)
    assert written.bytes < 200_000
    only = tmp_path / "site"
    only.mkdir()
    (only / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    # Neither site-packages nor the checkout: the folder and msgspec.
    check_answers(invoke(tmp_path / "out", [sys.executable, "-S"], f"{tmp_path / 'out'}:{only}"))


@pytest.mark.parametrize("target", Target)
def test_every_target_has_an_entry_pins_and_a_readme(tmp_path, target):
    out = tmp_path / "out"
    package(f"{write_functions(tmp_path)}:judged", target, out)
    readme = (out / "README.md").read_text()
    assert "served_rewards.py:judged" in readme
    assert "{{" not in "".join(path.read_text() for path in out.rglob("*") if path.is_file())
    lines = (out / "requirements.txt").read_text().splitlines()
    assert lines
    assert all("==" in line for line in lines)
    with pytest.raises(RequestError, match="exists already"):
        package(f"{tmp_path / 'served_rewards.py'}:judged", target, out)


def test_what_the_function_imports_goes_with_it(tmp_path):
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "__init__.py").write_text("from . import inner\n")
    (tmp_path / "helpers" / "inner.py").write_text("import xxhash\nimport sibling\n")
    (tmp_path / "helpers" / "words.txt").write_text("a word")
    (tmp_path / "sibling.py").write_text("import os, json\nfrom rollart import RequestError\n")
    (tmp_path / "mine.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "import rollart\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "def f(t: rollart.Transcript) -> float:\n    import helpers\n    return 1.0\n"
    )
    needs = needs_of(f"{tmp_path}/mine.py:f", [])
    assert {"mine.py", "sibling.py", "helpers/__init__.py", "helpers/inner.py", "helpers/words.txt"} < set(needs.files)
    assert {"rollart/types/transcript.py", "rollart/types/errors.py", "rollart/types/failures.py"} < set(needs.files)
    assert [each.partition("==")[0] for each in needs.requirements] == ["msgspec", "xxhash"]


@pytest.fixture(autouse=True)
def own_moves(monkeypatch):
    """A package maps the paths of its process; here, only for a test."""
    monkeypatch.setattr(factory, "_moved", [])


@pytest.mark.parametrize("given", ["0", "-1", "many", "1" * 5000])
def test_a_concurrency_that_is_no_number_is_refused(tmp_path, monkeypatch, given):
    monkeypatch.setenv(packaged.CONCURRENCY, given)
    with pytest.raises(RequestError, match=packaged.CONCURRENCY):
        packaged.asgi(str(tmp_path / "main.py"), f"{write_functions(tmp_path)}:correct")


def test_a_secret_with_a_newline_at_its_end_lets_in(tmp_path, monkeypatch):
    monkeypatch.setenv(packaged.SECRET, f"{SECRET}\n")
    score = packaged.functions_framework(str(tmp_path / "main.py"), f"{write_functions(tmp_path)}:correct")
    headers = {"Authorization": f"Bearer {SECRET}"}
    asked = SimpleNamespace(headers=headers, method="POST", path="/", get_data=request)
    assert score(asked)[1] == 200


def test_packages_that_share_a_name_are_all_pinned(tmp_path, monkeypatch):
    monkeypatch.setattr(closure.metadata, "packages_distributions", lambda: {"shared": ["pydantic", "pytest"]})
    (tmp_path / "mine.py").write_text("import shared.inner\n")
    found = needs_of(f"{tmp_path}/mine.py:f", []).requirements
    assert [each.partition("==")[0] for each in found] == ["pydantic", "pytest"]


def test_a_table_whose_code_is_in_another_folder_is_refused(tmp_path):
    (tmp_path / "judges.toml").write_text('[mine]\nfactory = "judges/mine.py:Judge"\n')
    with pytest.raises(RequestError, match="into one folder"):
        needs_of(f"{tmp_path}/judges.toml:mine", [])


def test_what_cannot_be_found_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_package\n")
    with pytest.raises(RequestError, match=r"mine\.py imports 'no_such_package'"):
        needs_of(f"{tmp_path}/mine.py:f", [])


def test_what_is_no_reward_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "mine.py").write_text("def f(a, b):\n    return 1.0\n")
    with pytest.raises(RequestError, match="takes one argument"):
        package(f"{tmp_path}/mine.py:f", Target.ASGI, tmp_path / "out")
    assert not (tmp_path / "out").exists()
