"""Tools of MCP servers, against a real one: over stdio and over HTTP, shared and per episode, alive and dead."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollart as api
from rollart.backends.environments.chat import ChatEnvironment, ChatTask
from rollart.ports.environment import TextStep
from rollart.types.errors import ConfigError, EnvironmentFault, RequestError
from rollart.types.ids import PromptId
from rollart.types.trajectory import Prompt

pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install 'rollart[mcp]'")

SERVER = [sys.executable, str(Path(__file__).parents[1] / "mcp_server.py")]
PATIENCE_S = 100.0


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"{pids} are left"
        time.sleep(0.01)


@pytest.fixture
def pids(tmp_path: Path) -> Any:
    """Servers that were started by a worker: all are gone in the end."""
    file = tmp_path / "pids"
    file.touch()

    def read() -> list[int]:
        return [int(line) for line in file.read_text().split()]

    read.env = {"MCP_PIDS": str(file)}  # type: ignore[attr-defined]
    yield read
    until_gone(read())


class HttpServer:
    """A server process on a port that it keeps when it is started again."""

    def __init__(self, *further: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._command = [*SERVER, str(self._port), *further]
        self.url = f"http://127.0.0.1:{self._port}/mcp"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HttpServer()
    yield server.url
    server.kill()


@pytest.fixture
def down(tmp_path: Path) -> Path:
    """While it exists, the proxy before `sessions` answers 502."""
    return tmp_path / "down"


@pytest.fixture
def sessions(down: Path) -> Iterator[HttpServer]:
    """A server of before 2026, which keeps sessions, behind a proxy."""
    server = HttpServer(str(down))
    yield server
    server.kill()


def task_of(*tools: Any, **settings: Any) -> ChatTask:
    return ChatTask(api.Task(prompts="x.jsonl", tools=list(tools), **{"tool_timeout_s": PATIENCE_S, **settings}), None)


class Episode:
    """An episode in an event loop of its own, as environment threads have."""

    def __init__(self, task: ChatTask) -> None:
        self.runner = asyncio.Runner()
        self.environment = ChatEnvironment(task)
        prompt = Prompt(PromptId("1"), "t", 1, {"question": "q"})
        self.first: TextStep = self.run(self.environment.reset(prompt))

    def run(self, answer: Any) -> Any:
        async def awaited() -> Any:
            return await answer

        return self.runner.run(awaited())

    def step(self, action: str) -> list[str]:
        step = self.run(self.environment.step(action))
        return [message["content"] for message in step.observation]

    def close(self) -> None:
        self.run(self.environment.close())
        self.runner.close()


def test_over_stdio(pids: Any) -> None:
    task = task_of(api.mcp(SERVER, env=pids.env))
    one, two = Episode(task), Episode(task)
    system = one.first.observation[0]
    assert isinstance(system, dict)
    assert "capital: COUNTRY (string). Look up the capital of a country." in system["content"]
    assert one.step("capital: Peru\ncapital: Japan") == ["Lima", "Tokyo"]
    assert two.step("count:") == ["2"], "both use the same server"
    assert "no country Atlantis" in one.step("capital: Atlantis")[0]
    assert "Error: " in one.step('{"name": "capital", "arguments": {"city": "Lima"}}')[0]
    assert one.step('{"name": "nothing"}')[0].startswith("Error: there is no tool 'nothing'")
    one.close()
    two.close()
    assert len(pids()) == 1
    task.close()


def test_over_http(url: str) -> None:
    task = task_of(api.mcp(url, tools=["capital"]))
    episode = Episode(task)
    assert episode.step("capital: Peru") == ["Lima"]
    assert episode.step('{"name": "count"}')[0].startswith("Error: there is no tool 'count'")
    episode.close()
    task.close()


def test_a_session_that_the_server_forgot_fails_the_episode_and_is_opened_again(sessions: HttpServer) -> None:
    task = task_of(api.mcp(sessions.url))
    one = Episode(task)
    assert one.step("capital: Peru\ncount:")[0] == "Lima"
    sessions.kill()
    sessions.start()
    with pytest.raises(EnvironmentFault, match="failed: MCPError: Session"):
        one.step("capital: Peru")
    one.close()
    two = Episode(task)
    assert two.step("capital: Peru") == ["Lima"]
    two.close()
    task.close()


def test_an_outage_of_the_server_is_no_result_of_a_tool(sessions: HttpServer, down: Path) -> None:
    task = task_of(api.mcp(sessions.url))
    one = Episode(task)
    assert one.step("capital: Peru") == ["Lima"]
    down.touch()
    with pytest.raises(EnvironmentFault, match="Server returned an error response"):
        one.step("capital: Peru")
    one.close()
    down.unlink()
    two = Episode(task)
    assert two.step("capital: Peru") == ["Lima"]
    two.close()
    task.close()


def test_calls_that_the_server_refuses_are_the_models(url: str) -> None:
    task = task_of(api.mcp(url))
    episode = Episode(task)
    for code in (-32603, -32602, -32001):
        assert episode.step(f'refuse: {{"code": {code}}}') == ["Error: not today"]
    assert episode.step("capital: Peru") == ["Lima"], "the connection stands"
    episode.close()
    task.close()


def test_a_malformed_result_is_an_error_of_the_tool_alone(pids: Any) -> None:
    task = task_of(api.mcp(SERVER, env=pids.env))
    episode = Episode(task)
    (told,) = episode.step("mislabelled:")
    assert told.startswith("Error: its result is malformed: Invalid structured content")
    assert episode.step("capital: Peru") == ["Lima"]
    episode.close()
    assert len(pids()) == 1, "the connection stands"
    task.close()


@pytest.mark.long
def test_a_server_per_episode(pids: Any) -> None:
    task = task_of(api.mcp(SERVER, env=pids.env, per_episode=True))
    one, two = Episode(task), Episode(task)
    one.step("capital: Peru")
    assert (one.step("count:"), two.step("count:")) == (["1"], ["0"])
    one.close()
    two.close()
    until_gone(pids())
    task.close()


def test_a_command_that_cannot_be_started_ends_the_wait() -> None:
    task = task_of(api.mcp(["python\0"]))
    with pytest.raises(EnvironmentFault, match="embedded null byte"):
        Episode(task)
    task.close()


def test_a_server_that_dies_fails_the_episode_and_is_started_again(pids: Any) -> None:
    task = task_of(api.mcp(SERVER, env=pids.env))
    one = Episode(task)
    with pytest.raises(EnvironmentFault, match=r"the MCP server .* failed"):
        one.step("leave:")
    one.close()
    two = Episode(task)
    assert two.step("capital: Peru") == ["Lima"]
    two.close()
    assert len(pids()) == 2
    task.close()


@pytest.mark.long
def test_a_call_that_hangs_is_bounded(pids: Any) -> None:
    task = task_of(api.mcp(SERVER, env=pids.env), tool_timeout_s=0.5)
    episode = Episode(task)
    assert episode.step("dawdle:") == ["Error: no answer within 0.5 s"]
    episode.close()
    task.close()


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        (api.mcp(["no-such-command-anywhere"]), "cannot be used: .*no-such-command"),
        (api.mcp([sys.executable, "-c", "pass"]), "cannot be used"),
        (api.mcp("http://127.0.0.1:9/mcp"), "cannot be used"),
        (api.mcp([sys.executable, "-c", "import time; time.sleep(300)"], starts_s=1.0), "no answer within 1 s"),
        (api.mcp(SERVER, tools=["capitol"]), "it has no tool 'capitol'; it has capital, count"),
    ],
)
def test_a_server_that_cannot_be_used_is_a_failure_of_the_environment(server: Any, problem: str) -> None:
    task = task_of(server)
    wrong = "no-such-command" in problem or "no tool" in problem
    with pytest.raises(RequestError if wrong else EnvironmentFault, match=problem):
        Episode(task)
    task.close()


def capital(country: str) -> str:
    """Of a country."""
    return country


@pytest.mark.long
def test_names_of_tools_are_unique(pids: Any) -> None:
    task = task_of(capital, api.mcp(SERVER, env=pids.env))
    with pytest.raises(RequestError, match="two tools have the name 'capital'"):
        Episode(task)
    task.close()


@pytest.mark.parametrize("server", ["ftp://x", []])
def test_what_is_no_server(server: Any) -> None:
    with pytest.raises(ConfigError, match=r"not an http|either command"):
        api.mcp(server)


@pytest.mark.long
def test_a_killed_worker_leaves_no_server(tmp_path: Path, pids: Any) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import asyncio, sys, time\n"
        "from rollart import mcp\n"
        "from rollart.backends.environments.mcp_tools import McpServers\n"
        f"servers = McpServers([mcp({SERVER!r}, env={pids.env!r}).mcp], 60.0)\n"
        "print(len(asyncio.run(servers.tools(1))), flush=True)\n"
        "time.sleep(300)\n"
    )
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    assert process.stdout.readline() == "6\n"
    process.kill()
    process.wait()
    process.stdout.close()
    until_gone(pids())
