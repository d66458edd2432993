"""Environments in an interpreter of its own, beyond the conformance suite: what goes wrong there."""

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import misbehaving
import pytest
from other_python import other_python
from parts import PATIENCE_S, Driver

from rollart.backends.environments import interpreter
from rollart.backends.environments.codec import END_OF_TURN, ByteCodec
from rollart.backends.environments.host import EnvironmentHost
from rollart.backends.environments.interpreter import Interpreter, RemoteEnvironment, RemoteFailure, Work
from rollart.backends.environments.shipping import LOADER, PACKAGES, shipped_sources, source_of
from rollart.types.errors import RequestError
from rollart.types.messages import Close, EnvironmentFailed, Observed, Reset, Step
from rollart.types.tokens import Segment
from rollart.types.trajectory import Prompt

OBEDIENT = f"{misbehaving.__file__}:Obedient"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter without any package."""
    return other_python(tmp_path_factory.mktemp("bare"), packages=False)


@pytest.fixture
def started(bare_python: str) -> Iterator[Callable[..., Interpreter]]:
    """Starts interpreters that are closed at the end."""
    made: list[Interpreter] = []

    def start(factory: str = OBEDIENT, slots: int = 2, **settings: object) -> Interpreter:
        made.append(Interpreter(bare_python, Work(factory, settings), title="obedient", slots=slots))
        return made[-1]

    yield start
    for each in made:
        each.close()


def episode(source: Interpreter, seed: int = 1, **data: object) -> RemoteEnvironment:
    environment = source.build()
    assert environment.reset(Prompt("p", "t", seed, data)).observation == f"yours {seed}"
    return environment


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_every_field_of_a_step_arrives(started: Callable[..., Interpreter]) -> None:
    step = episode(started()).step("done")
    assert step[:7] == ("bye ä€", 1.0, True, False, False, b"\x00\xff", "end")


def test_what_libraries_print_is_not_taken_for_an_answer(started: Callable[..., Interpreter]) -> None:
    environment = episode(started())
    assert environment.step("print x").observation == "x"
    assert environment.step("say y").observation == "y"


def test_failures_are_those_of_the_environment(started: Callable[..., Interpreter]) -> None:
    source = started()
    for order, reason, permanent in (
        ("wrong", "TypeError: wrong", True),
        ("number", "the environment returned a int; it must be a TextStep", True),
        ("surrogate", "UnicodeEncodeError: ", False),
    ):
        with pytest.raises(RemoteFailure) as failed:
            episode(source).step(order)
        assert str(failed.value).startswith(reason)
        assert failed.value.permanent is permanent


def test_a_process_that_dies_fails_its_episodes_and_is_started_again(started: Callable[..., Interpreter]) -> None:
    source = started()
    other, environment = episode(source), episode(source)
    before = source.pid
    with pytest.raises(RemoteFailure, match=r"ended with exit code 7; last output: out of luck") as failed:
        environment.step("die")
    assert not failed.value.permanent
    with pytest.raises(RemoteFailure, match="exit code 7"):
        other.step("say x")
    assert episode(source).step("say again").observation == "again"
    assert source.pid != before


def test_starts_that_bring_nothing_back_off(started: Callable[..., Interpreter]) -> None:
    source = started()
    for wait_s in (0.0, 0.0, interpreter.FIRST_BACK_OFF_S, 2 * interpreter.FIRST_BACK_OFF_S):
        began = time.monotonic()
        with pytest.raises(RemoteFailure, match="exit code 3"):
            source.build().reset(Prompt("p", "t", 1, {"die": True}))
        assert time.monotonic() - began >= wait_s
    episode(source)


def test_its_processes_end_with_it(started: Callable[..., Interpreter]) -> None:
    source = started()
    environment = episode(source)
    child = int(environment.step("spawn").observation)
    with pytest.raises(RemoteFailure):
        environment.step("die")
    wait_until(lambda: is_gone(child), "a process of an environment outlived the interpreter that died")
    environment = episode(source)
    child, process = int(environment.step("spawn").observation), source.pid
    source.close()
    assert is_gone(process)
    wait_until(lambda: is_gone(child), "a process of an environment outlived the interpreter that was closed")


HOLDER = """
import sys, threading
from rollart.backends.environments.interpreter import Interpreter, Work
from rollart.types.trajectory import Prompt
source = Interpreter(sys.argv[1], Work(sys.argv[2], {}), title="orphan", slots=2)
environment = source.build()
environment.reset(Prompt("p", "t", 1, {}))
print(source.pid, environment.step("spawn").observation, flush=True)
if len(sys.argv) > 3:
    environment.step(sys.argv[3])
threading.Event().wait()
"""


@pytest.mark.parametrize("busy", ["", "hang-in-c"])
def test_nothing_outlives_a_worker_that_is_killed(bare_python: str, busy: str) -> None:
    """Not even an interpreter that hangs in C code, nor what it started."""
    command = [sys.executable, "-c", HOLDER, bare_python, OBEDIENT, *([busy] if busy else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        pids = [int(pid) for pid in holder.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(map(is_gone, pids))
        holder.send_signal(signal.SIGKILL)
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), f"process {pid} outlived its worker")  # type: ignore[misc]


def test_async_environments_have_a_loop_for_the_episode(started: Callable[..., Interpreter]) -> None:
    source = started(f"{misbehaving.__file__}:Slow")
    environment = source.build()
    environment.reset(Prompt("p", "t", 1))
    assert [environment.step("x").observation for _ in range(3)] == ["ticking"] * 3
    environment.close()
    assert source.build().reset(Prompt("p", "t", 1)).observation == "hello"


# --- in a worker


def hosted(python: str, tmp_path: Path, slots: int = 2) -> Driver:
    settings = {"task": "obedient", "environment": OBEDIENT, "python": python, "slots": slots}
    return Driver(EnvironmentHost, {**settings, "environment_settings": {"notes": str(tmp_path / "notes")}})


def hanging(folder: Path) -> int:
    notes = folder / "notes"
    return notes.read_text().count("hangs") if notes.exists() else 0


def reset(id: int, slot: int = 0, **data: object) -> Reset:
    return Reset(id, slot, Prompt("p", "obedient", id, data), 0)  # type: ignore[arg-type]


def step(id: int, turn: int, text: str) -> Step:
    return Step(id, turn, Segment.of([*text.encode(), END_OF_TURN]))  # type: ignore[arg-type]


def test_a_worker_goes_on_while_an_environment_hangs(bare_python: str, tmp_path: Path) -> None:
    driver = hosted(bare_python, tmp_path)
    driver.call(reset(1, slot=0), reset(2, slot=1))
    driver.send(step(1, 1, "hang"))
    driver.slice()
    wait_until(lambda: hanging(tmp_path) == 1, "no call hangs")
    (observed,) = driver.call(step(2, 1, "say x"))
    assert isinstance(observed, Observed)
    driver.send(Close(1))  # type: ignore[arg-type]  # as at its deadline
    (fresh,) = driver.call(reset(3, slot=0))
    assert isinstance(fresh, Observed)
    assert fresh.observation.ids().tolist() == ByteCodec().render("yours 3", first=True)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("obedient:0")]
    driver.worker.close()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the thread of an environment that hangs elsewhere is free again"


def test_more_hanging_calls_than_slots_end_the_process(bare_python: str, tmp_path: Path) -> None:
    driver = hosted(bare_python, tmp_path, slots=1)
    (_,), (first,) = driver.call(reset(1)), driver.call(step(1, 1, "pid"))
    for id in (1, 2):
        driver.send(step(id, 2 if id == 1 else 1, "hang"))
        driver.slice()
        wait_until(lambda lines=id: hanging(tmp_path) == lines, "no call hangs")  # type: ignore[misc]
        (_,) = driver.call(reset(id + 1))
    (now,) = driver.call(step(3, 1, "pid"))
    assert isinstance(first, Observed)
    assert isinstance(now, Observed)
    assert first.observation != now.observation
    driver.worker.close()


def test_a_death_is_a_failure_of_the_open_episodes(bare_python: str, tmp_path: Path) -> None:
    driver = hosted(bare_python, tmp_path)
    driver.call(reset(1, slot=0), reset(2, slot=1))
    (failed,) = driver.call(step(1, 1, "die"))
    assert isinstance(failed, EnvironmentFailed)
    assert not failed.permanent
    (also,) = driver.call(step(2, 1, "say x"))
    assert isinstance(also, EnvironmentFailed)
    assert "exit code 7" in also.reason
    (again,) = driver.call(reset(3, slot=0))
    assert isinstance(again, Observed)
    driver.worker.close()
    assert (tmp_path / "notes").read_text() == "closed\n", "the open environment was closed in order"


# --- what cannot start


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (f"{misbehaving.__file__}:Disobedient", "has no 'Disobedient' (did you mean Obedient?)"),
        ("no_such_package:Environment", "cannot import 'no_such_package'"),
    ],
)
def test_a_factory_that_is_not_there_is_refused(bare_python: str, factory: str, reason: str) -> None:
    with pytest.raises(RequestError) as refused:
        Interpreter(bare_python, Work(factory, {}), title="x", slots=1)
    assert bare_python in str(refused.value)
    assert reason in str(refused.value)


def test_an_interpreter_that_is_not_there_is_refused_with_the_node(tmp_path: Path) -> None:
    missing = str(tmp_path / "bin" / "python")
    with pytest.raises(RequestError, match=rf"node {os.uname().nodename}: the interpreter {missing} does not exist"):
        Interpreter(missing, Work(OBEDIENT, {}), title="x", slots=1)


def test_a_program_that_is_no_interpreter_is_refused() -> None:
    with pytest.raises(RequestError, match=r"/bin/false cannot play .* ended with exit code 1"):
        Interpreter("/bin/false", Work(OBEDIENT, {}), title="x", slots=1)


def test_only_a_part_of_rollart_is_there(bare_python: str, tmp_path: Path) -> None:
    (tmp_path / "curious.py").write_text("import rollart\nTask = rollart.Task\n")
    with pytest.raises(RequestError, match=r"rollart\.Task does not exist in an interpreter of its own"):
        Interpreter(bare_python, Work(f"{tmp_path}/curious.py:Task", {}), title="x", slots=1)


# --- what travels

NEWER_THAN_3_10 = {"Runner", "StrEnum", "Self", "TaskGroup", "assert_never", "tomllib", "ExceptionGroup", "UTC"}
LIBRARIES = {"gem", "gymnasium", "numpy", "nltk", "reasoning_gym", "textarena"}


@pytest.mark.parametrize("module", [*sorted(shipped_sources()), LOADER])
def test_shipped_modules_need_only_each_other_and_python_3_10(module: str) -> None:
    source = shipped_sources().get(module) or source_of(LOADER)
    tree = ast.parse(source, feature_version=(3, 10))
    at_import = {id(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    inside = {id(inner) for node in ast.walk(tree) if id(node) in at_import for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            assert name not in NEWER_THAN_3_10, f"{module}:{node.lineno}: {name}"
        imported = imported_by(node)
        if imported is None or _for_types_only(tree, node):
            continue
        top = imported.partition(".")[0]
        allowed = imported in shipped_sources() or top in sys.stdlib_module_names
        if not allowed:
            assert id(node) in inside, f"{module} imports {imported} at import time"
            assert top in LIBRARIES, f"{module} imports {imported}"


def imported_by(node: ast.AST) -> str | None:
    if isinstance(node, ast.Import):
        return node.names[0].name
    return node.module if isinstance(node, ast.ImportFrom) and node.module != "__future__" else None


def _for_types_only(tree: ast.Module, node: ast.AST) -> bool:
    blocks = [each for each in tree.body if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"]
    return any(node in block.body for block in blocks)


def test_packages_have_sources() -> None:
    assert set(PACKAGES) <= set(shipped_sources())
