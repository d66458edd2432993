"""Python as a tool: a program runs in a sandbox of its own, and the agent sees what it printed.

    program ─► wait for a place ─► a warm sandbox ─► python3, under limits ─► printed text, cut ─► sandbox removed

Invariants:
- every program has a fresh sandbox, so nothing of another episode or of an earlier program is in it;
- a process has at most `AT_ONCE` programs running, whatever the number of its environments, and holds no sandbox
  between two programs; the others wait. The pool keeps a few more sandboxes warm;
- whatever a program does, it has a text: limits are the agent's result. What fails outside of it raises `SandboxFault`.
"""

import os
import threading

from rollart.ports.sandbox import Sandboxes
from rollart.tasks.sandboxes import shared_sandboxes
from rollart.types.errors import RequestError, SandboxFault, SandboxUnavailable
from rollart.types.failures import FailureKind
from rollart.types.sandboxes import ExecResult, Limits, SandboxSpec

_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
AT_ONCE = 2 * _CPUS
"""Programs that run at the same time in this process; more would only be slower."""
WAIT_S = 100.0
"""Limit of the wait for a place, and of that for a sandbox."""
NOTHING = "nothing printed"
CUT = "..."
OVER = {"time": "time limit", "memory": "memory limit", "processes": "process limit", "disk": "disk limit"}
"""What the agent sees of a limit; too much output is only cut."""
RUNNER = """\
import sys
tree = compile(sys.stdin.buffer.read(), "program", "exec", 0x400)
last = tree.body.pop() if tree.body and type(tree.body[-1]).__name__ == "Expr" else None
names = {"__name__": "__main__"}
exec(compile(tree, "program", "exec"), names)
if last is not None:
    from _ast import Expression
    value = eval(compile(Expression(last.value), "program", "eval"), names)
    if value is not None:
        print(value)
"""
"""Runs a program and prints the value of a last line that is an expression, as notebooks do."""
COMMAND = ("python3", "-I", "-S", "-c", RUNNER)
"""Without site packages: the standard library alone, which starts in a third of the time."""

_places = threading.BoundedSemaphore(AT_ONCE)
_lock = threading.Lock()
_tried: dict[tuple[str, SandboxSpec], bool] = {}


class PythonTool:
    """Runs programs; made anew for every episode, at no cost."""

    def __init__(self, factory: str, limits: Limits, most_chars: int) -> None:
        """`factory`: of the source of sandboxes. `most_chars`: of what was printed, and of an error, are shown.

        Raises `RequestError` if this machine has no sandboxes, or no Python in them that starts within the limits.
        """
        self._sandboxes = shared_sandboxes(factory)
        self._spec = SandboxSpec(limits=limits)
        self._most_chars = most_chars
        self._try_once(factory)

    def __call__(self, program: str) -> str:
        return shown(self._run(program), self._most_chars)

    def _run(self, program: str) -> ExecResult:
        if not _places.acquire(timeout=WAIT_S):
            raise SandboxFault(f"{AT_ONCE} other programs ran for {WAIT_S:g} s", FailureKind.DEADLINE)
        try:
            return _in_fresh_sandbox(self._sandboxes, self._spec, program)
        finally:
            _places.release()

    def _try_once(self, factory: str) -> None:
        with _lock:
            if not _tried.get((factory, self._spec)):
                result = _in_fresh_sandbox(self._sandboxes, self._spec, "6*7")
                if result.exit_code == 127:
                    raise SandboxUnavailable("python3 is missing in /usr/bin, which sandboxes share; install python3")
                if result.memory_exceeded:
                    raise RequestError(f"Python does not start in {self._spec.limits.memory_mb} MB; raise memory_mb")
                if result.stdout != b"42\n":
                    raise SandboxFault(f"Python does not work in a sandbox: {shown(result, 200)}")
                _tried[factory, self._spec] = True


def _in_fresh_sandbox(sandboxes: Sandboxes, spec: SandboxSpec, program: str) -> ExecResult:
    sandbox = sandboxes.create(spec, deadline_s=WAIT_S)
    try:
        return sandbox.exec(COMMAND, stdin=program.encode(errors="replace"))
    finally:
        sandbox.close()


def shown(result: ExecResult, most_chars: int) -> str:
    """What the agent sees: what was printed, the last line of an error, and limits that ended it.

    >>> shown(ExecResult(exit_code=0, stdout=b"694\\n"), 20)
    '694'
    >>> shown(ExecResult(exit_code=1, stderr=b"Traceback ...\\nNameError: name 'x' is not defined\\n"), 20)
    "NameError: name 'x' ..."
    >>> shown(ExecResult(exit_code=None, signal=9, timed_out=True, stdout=b"1"), 20)
    '1\\ntime limit'
    """
    lines = [_cut(result.stdout.decode(errors="replace").strip(), most_chars)]
    over = [text for limit, text in OVER.items() if limit in result.exceeded]
    if not result.ok and not over:
        error = result.stderr.decode(errors="replace").strip().splitlines()
        ended = f"signal {result.signal}" if result.exit_code is None else f"exit code {result.exit_code}"
        lines.append(_cut(error[-1], most_chars) if error else ended)
    return "\n".join(line for line in (*lines, *over) if line) or NOTHING


def _cut(text: str, most_chars: int) -> str:
    return text if len(text) <= most_chars else text[:most_chars] + CUT
