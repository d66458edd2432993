"""The grader of free repairs: it runs every test case of a module in a fresh sandbox, and decides outside of it.

       worker (grader)                         sandbox that only the grader has used
    for every case
      module, expression ──────────────► a process of its own ── value as text ──┐
      compare bytes with the expected text ◄─────────────────────────────────────┘

What holds, whatever the module does:
- The sandbox gets the text of the module and the expression of one case. Expected values, other cases, the reward and
  this code are in another process, of another user, outside of it.
- A case passes if the process that ran it ended by itself with code 0, within its limits, and wrote exactly the bytes
  that stand for the expected value, or for the name of the expected error, and nothing else. Exit code and limits are
  observed by the sandbox's supervisor. What was written is compared and never parsed, unpickled or evaluated; types
  are part of the text, so that no `__eq__` of the module runs and True is not 1.
- Every case has a process of its own: patched builtins, threads, exit handlers and background processes end with it.
  Files are no way to the next process either: it reads the module from its input, isolated and without site packages.

A module can take over the process that runs it and write what it likes. So the best that a forger can do is to write
the right value for expressions that it has not seen before, which is what the task asks for, or to guess it. Cases
whose values are guessed easily (True or False) are never alone: all cases of a module have to pass.

Running over a limit, ending the process and writing nonsense are results of the module: the case fails. Only the loss
of the sandbox is a failure of the environment (`SandboxFault`).
"""

import ast
import signal
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from rollart.ports.sandbox import Sandbox
from rollart.tasks.repair import probe
from rollart.tasks.repair.bugs import Case
from rollart.types.errors import SandboxUnavailable
from rollart.types.sandboxes import ExecResult

GRADING_S = 90.0
"""Limit of the wall-clock time of all cases together, which only code that waits reaches: that of the processor time
of a case is much shorter (`probe`)."""
PYTHON = ("python3", "-I", "-S", "-c")
"""An interpreter without site packages, environment and current folder."""


class Verdict(NamedTuple):
    """What became of each case, in order; cases after one that ran over its limits have not passed."""

    passed: tuple[bool, ...]
    flags: tuple[str, ...]
    """What honest code does not do, each once."""

    @property
    def all_passed(self) -> bool:
        return bool(self.passed) and all(self.passed)


def grade(sandbox: Sandbox, name: str, source: bytes, cases: Sequence[Case]) -> Verdict:
    """Run the cases of a module in a fresh sandbox."""
    passed: list[bool] = []
    flags: dict[str, None] = {}
    left_s = GRADING_S
    for case in cases:
        result = sandbox.exec([*PYTHON, _probe(), name, case.expression], stdin=source, time_s=left_s)
        left_s -= result.seconds
        passed.append(result.ok and not result.exceeded and result.stdout == expected_line(case))
        if not passed[-1]:
            flags |= dict.fromkeys(oddities(result))
        if result.timed_out or result.signal is not None or result.memory_exceeded or left_s <= 0:
            break  # the other cases would take as long
    return Verdict((*passed, *[False] * (len(cases) - len(passed))), tuple(flags))


@lru_cache(maxsize=4096)
def expected_line(case: Case) -> bytes:
    """The bytes of a case that passes."""
    return probe.error_line(case.error) if case.error else probe.value_line(ast.literal_eval(case.expected))


def oddities(result: ExecResult) -> list[str]:
    """What is observed of a process that failed its case, beyond a wrong value."""
    found = [f"a case ran over its limit of {name}" for name in result.exceeded]
    if result.signal == signal.SIGXCPU:
        found.append("a case ran over its limit of processor time")
    elif result.signal is not None and not result.exceeded:
        found.append(f"a case was ended by signal {result.signal}")
    elif result.exit_code:
        found.append(f"a case ended its process with code {result.exit_code}")
    elif result.exit_code == 0 and not result.stdout:
        found.append("a case ended its process without an answer")
    if result.stdout and not _is_answer(result.stdout):
        found.append("a case wrote to the grader")
    return found


def _is_answer(text: bytes) -> bool:
    """Whether a process wrote a single answer."""
    return text.startswith((b"value ", b"raised ")) and text.endswith(b"\n") and text.count(b"\n") == 1


def check_python(sandbox: Sandbox) -> None:
    """Raise `SandboxUnavailable` if a sandbox, in which nothing of an agent has run, has no Python."""
    result = sandbox.exec([*PYTHON, "import resource"])
    if not result.ok:
        said = (result.stderr or result.stdout).decode(errors="replace").strip()[-200:]
        raise SandboxUnavailable(f"repair needs python3 in its sandboxes ({said}); install it, or give another base")


@lru_cache
def _probe() -> str:
    return Path(probe.__file__).read_text(encoding="utf-8")
