"""Rules about code that imports alone do not show: what `control` may use of asyncio.

`TaskGroup` cancels in the order of a set, `wait` and `as_completed` answer in one, threads and executors bring the
machine's timing in, streams and transports bring real sockets. Any of these makes the same seed give another journal.
"""

import ast
from pathlib import Path

import pytest

CONTROL = Path(__file__).parents[1] / "src" / "rollart" / "control"

BANNED_FROM_ASYNCIO = frozenset(
    {
        "TaskGroup",
        "as_completed",
        "open_connection",
        "open_unix_connection",
        "run_coroutine_threadsafe",
        "start_server",
        "start_unix_server",
        "to_thread",
        "wait",
    }
)
BANNED_METHODS = frozenset(
    {
        "call_soon_threadsafe",
        "create_connection",
        "create_server",
        "run_in_executor",
        "set_default_executor",
        "subprocess_exec",
        "subprocess_shell",
    }
)


def forbidden_uses(source: str) -> list[str]:
    """What a module of `control` uses though it may not, as `line: name`."""
    tree = ast.parse(source)
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "asyncio"
    }
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in aliases and attr in BANNED_FROM_ASYNCIO:
                found.append((node.lineno, f"asyncio.{attr}"))
            case ast.Attribute(attr=attr) if attr in BANNED_METHODS:
                found.append((node.lineno, attr))
            case ast.ImportFrom(module="asyncio", names=names):
                found += [(node.lineno, f"asyncio.{a.name}") for a in names if a.name in BANNED_FROM_ASYNCIO | {"*"}]
            case ast.ImportFrom(module=str(module)) if module.startswith(("asyncio.", "concurrent")):
                found.append((node.lineno, module))
            case ast.Import(names=names):
                found += [(node.lineno, a.name) for a in names if a.name.startswith(("asyncio.", "concurrent"))]
    return [f"{line}: {what}" for line, what in sorted(found)]


@pytest.mark.parametrize("path", sorted(CONTROL.rglob("*.py")), ids=lambda path: str(path.relative_to(CONTROL)))
def test_control_uses_nothing_that_runs_in_an_order_of_its_own(path: Path) -> None:
    assert forbidden_uses(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import asyncio\nasync def f():\n    async with asyncio.TaskGroup() as group: pass", ["3: asyncio.TaskGroup"]),
        ("import asyncio as aio\naio.wait([])", ["2: asyncio.wait"]),
        ("import asyncio\nasyncio.as_completed([])", ["2: asyncio.as_completed"]),
        ("import asyncio\nasyncio.to_thread(print)", ["2: asyncio.to_thread"]),
        ("import asyncio\nasyncio.get_running_loop().run_in_executor(None, print)", ["2: run_in_executor"]),
        ("import asyncio\nasyncio.open_connection()", ["2: asyncio.open_connection"]),
        ("import asyncio\nasyncio.start_server(print)", ["2: asyncio.start_server"]),
        ("from asyncio import Event, wait", ["1: asyncio.wait"]),
        ("from asyncio import *", ["1: asyncio.*"]),
        ("from asyncio.taskgroups import TaskGroup", ["1: asyncio.taskgroups"]),
        ("import asyncio.streams", ["1: asyncio.streams"]),
        ("from concurrent.futures import ThreadPoolExecutor", ["1: concurrent.futures"]),
        ("import concurrent.futures", ["1: concurrent.futures"]),
    ],
)
def test_the_check_finds_each_of_them(source: str, found: list[str]) -> None:
    assert forbidden_uses(source) == found


def test_the_check_leaves_the_rest_of_asyncio_alone() -> None:
    assert forbidden_uses("import asyncio\nevent = asyncio.Event()\nevent.wait()\nself.wait()\nasyncio.Future()") == []
