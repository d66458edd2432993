"""The SWE-ReX client against the real server; `make test-swerex` installs it in an environment of its own."""

import json
import os
import secrets
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rollart.backends.sandboxes.swerex import SweRexSandbox, SweRexSandboxes
from rollart.conformance.case import Case, NotApplicable
from rollart.conformance.sandbox import CASES, SandboxHarness
from rollart.types.errors import SandboxFault, SandboxLost, SandboxUnavailable
from rollart.types.sandboxes import SandboxSpec

TOKEN = secrets.token_hex(8)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    program = os.environ.get("ROLLART_SWEREX", "")
    if not program:
        pytest.skip("ROLLART_SWEREX names no server: make test-swerex")
    port = free_port()
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--auth-token", TOKEN]
    log = tmp_path_factory.mktemp("swerex") / "log"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        url = f"http://127.0.0.1:{port}"
        request = urllib.request.Request(f"{url}/is_alive", headers={"X-API-Key": TOKEN})
        deadline = time.monotonic() + 90
        while True:
            try:
                with urllib.request.urlopen(request, timeout=10):
                    break
            except OSError:
                assert time.monotonic() < deadline, log.read_text()
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
        yield url, process
        process.kill()


@pytest.fixture
def spec(tmp_path: Path) -> SandboxSpec:
    """The server runs on this machine, as this user, so it works in a folder of the test."""
    return SandboxSpec(workdir=str(tmp_path / "work"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(
    case: Case[SandboxHarness, None], server: tuple[str, object], spec: SandboxSpec, tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    sandboxes = SweRexSandboxes([server[0]], TOKEN)
    harness = SandboxHarness(sandboxes=sandboxes, scratch=tmp_path / "scratch", features=frozenset(), spec=spec)
    try:
        case.run(harness)
    except NotApplicable as reason:
        pytest.skip(str(reason))
    finally:
        sandboxes.close()


def test_a_server_is_one_sandbox_at_a_time(server: tuple[str, object], spec: SandboxSpec) -> None:
    sandboxes = SweRexSandboxes([server[0]], TOKEN)
    first = sandboxes.create(spec)
    with pytest.raises(SandboxFault, match="free"):
        sandboxes.create(spec, deadline_s=0.0)
    first.close()
    with pytest.raises(SandboxLost):
        first.exec(["true"])
    sandboxes.create(spec).close()


def test_a_wrong_token_is_refused(server: tuple[str, object], spec: SandboxSpec) -> None:
    with pytest.raises((SandboxUnavailable, SandboxFault)):
        SweRexSandboxes([server[0]], "wrong").create(spec)


def test_what_the_wire_does_not_carry_is_refused(server: tuple[str, object], spec: SandboxSpec) -> None:
    sandbox = SweRexSandboxes([server[0]], TOKEN).create(spec)
    for attempt in (sandbox.snapshot, lambda: sandbox.reset("x"), lambda: sandbox.exec(["true"], keep_background=True)):
        with pytest.raises(SandboxUnavailable):
            attempt()
    assert sandbox.exec(["true"]).ok


def test_a_session_keeps_its_state(server: tuple[str, object], spec: SandboxSpec) -> None:
    sandbox = SweRexSandboxes([server[0]], TOKEN).create(spec)
    session = sandbox.session()
    assert session.run("x=5; mkdir -p inner; cd inner")[1] == 0
    output, code = session.run("echo $x in $(basename $PWD); false")
    assert (output.strip(), code) == ("5 in inner", 1)
    session.close()


class Server(BaseHTTPRequestHandler):
    """Answers as if every command succeeded; `true` runs until it may end."""

    started, may_end = threading.Event(), threading.Event()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if b'"true"' in body:
            self.started.set()
            self.may_end.wait(60)
        answer = json.dumps({"exit_code": 0, "stdout": "", "stderr": ""}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_is_not_free_before_the_command_of_a_closed_sandbox_has_ended() -> None:
    ends: list[object] = []

    def run(sandbox: SweRexSandbox) -> None:
        try:
            ends.append(sandbox.exec(["true"]))
        except SandboxLost as error:
            ends.append(error)

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sandboxes = SweRexSandboxes([f"http://127.0.0.1:{server.server_port}"], TOKEN)
        first = sandboxes.create(SandboxSpec())
        thread = threading.Thread(target=run, args=(first,))
        thread.start()
        assert Server.started.wait(60)
        first.close()
        with pytest.raises(SandboxFault, match="free"):
            sandboxes.create(SandboxSpec(), deadline_s=0.0)
        Server.may_end.set()
        thread.join()
        assert [type(end) for end in ends] == [SandboxLost]
        first.close()
        second = sandboxes.create(SandboxSpec(), deadline_s=0.0)
        second.close()
        sandboxes.close()
        with pytest.raises(SandboxFault, match="closed"):
            sandboxes.create(SandboxSpec())
        server.shutdown()


def test_an_unreachable_server_is_a_failure_and_no_result(spec: SandboxSpec) -> None:
    with pytest.raises(SandboxLost, match="cannot be reached"):
        SweRexSandboxes([f"http://127.0.0.1:{free_port()}"], TOKEN).create(spec)
