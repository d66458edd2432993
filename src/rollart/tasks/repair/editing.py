"""Repair, levels 2 and 3: free editing, with tools, in a sandbox.

    `money.py` has a bug: split(100, 3) gives [33, 33, 33], not [34, 33, 33]. …
                                                      read_file: money.py
    def split(cents: int, people: int) -> list[int]: …
                                                      edit_file: {"path": "money.py", "old": "…", "new": "…"}
                                                      run_tests:
    12 of 12 tests pass
                                                      Done.

The episode ends with the first answer that calls no tool, or with the last turn. The module, and nothing else, then
goes to a second, fresh sandbox, where all tests are run (`grading`): the reward is 1 if all of them pass, and else 0.
It is 0 as well if the agent did what is forbidden: it changed the visible tests, planted files that Python loads by
itself, or wrote where graders keep their files. The artifact of the transcript says what was observed (`Report`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollart.ports.environment import TextStep
from rollart.ports.sandbox import Sandbox
from rollart.tasks.repair.bugs import LEVELS, Bug, drawn, module
from rollart.tasks.repair.grading import Verdict, check_python, grade
from rollart.tasks.repair.harbor import check_text
from rollart.tasks.repair.workplace import CHECK, Handed, Workplace, spec_of
from rollart.tasks.sandboxes import BUBBLEWRAP, Lease, shared_sandboxes
from rollart.types.errors import EnvironmentFault, RequestError
from rollart.types.sandboxes import HOST_BASE, SandboxSpec
from rollart.types.trajectory import Prompt

INSTRUCTION = """\
`{file}` has a bug: {symptom}.

Repair it. What its functions must do is in their docstrings; keep their names and arguments. The tests in `{check}` \
must stay as they are; there are others, which are hidden. When you are done, answer without calling a tool."""
MOST_NOTES = 5
_checked: set[tuple[str, SandboxSpec]] = set()
"""Sources and specs of this process whose sandboxes have Python."""


@dataclass(frozen=True)
class Report:
    """What became of an episode, for reward functions and people."""

    module: str
    kind: str
    passed: int
    tests: int
    flags: Sequence[str]
    forbidden: Sequence[str]
    source: str
    """The module as it was graded."""


class EditRepair:
    """A `ToolEnvironment`. `sandboxes` names the source of its sandboxes, `base` their root file system."""

    def __init__(self, *, level: int = 2, sandboxes: str = BUBBLEWRAP, base: str = HOST_BASE) -> None:
        if level not in LEVELS:
            raise RequestError(f"there is no level {level} of free repair; levels are {', '.join(map(str, LEVELS))}")
        self._level = level
        self._source = sandboxes
        self._spec = spec_of(base, Path(__file__).resolve().parent)
        self._bug: Bug | None = None
        self._place: Workplace | None = None
        self._open: list[Sandbox] = []

    @staticmethod
    def open_shared(*, sandboxes: str = BUBBLEWRAP, **settings: Any) -> Lease:  # noqa: ARG004 - of the environments
        """The source of sandboxes, while a worker has environments."""
        return Lease(sandboxes)

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        return (self.list_files, self.read_file, self.edit_file, self.run_tests)

    def reset(self, prompt: Prompt) -> TextStep:
        self.close()
        bug = drawn(prompt, self._level)
        broken = bug.edit.apply(module(bug.module).source)
        self._place = Workplace(self._sandbox(), bug.module, broken, check_text(bug))
        self._bug = bug
        return TextStep(INSTRUCTION.format(file=f"{bug.module}.py", symptom=bug.symptom, check=CHECK))

    # --- tools ------------------------------------------------------------------------------------------------------

    def list_files(self) -> str:
        """List the files."""
        return self._working.files()

    def read_file(self, path: str) -> str:
        """Show a file."""
        return self._working.read(path)

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace text in a file.

        Args:
            path: The file.
            old: Text that occurs exactly once; empty to replace the whole file, or to create it.
            new: Text in its place.
        """
        return self._working.edit(path, old, new)

    def run_tests(self) -> str:
        """Run the tests that are not hidden."""
        return self._working.run_tests()

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self, answer: str) -> TextStep:  # noqa: ARG002 - what counts is the module
        bug, handed = self._bug, self._working.handed()
        assert bug is not None
        self.close()
        known = module(bug.module)
        verdict = Verdict((False,) * len(known.cases), ())
        if handed.source is not None:
            verdict = grade(self._sandbox(), bug.module, handed.source, known.cases)
        self.close()
        report = _report(bug, handed, verdict)
        reward = float(verdict.all_passed and not handed.forbidden)
        return TextStep(_summary(report), reward, done=True, artifact=json.dumps(asdict(report)).encode())

    def close(self) -> None:
        self._place = None
        while self._open:
            self._open.pop().close()

    @property
    def _working(self) -> Workplace:
        if self._place is None:
            raise EnvironmentFault("there is no episode: reset the environment first")
        return self._place

    def _sandbox(self) -> Sandbox:
        """A fresh one."""
        sandbox = shared_sandboxes(self._source).create(self._spec)
        self._open.append(sandbox)
        if (self._source, self._spec) not in _checked:
            check_python(sandbox)
            _checked.add((self._source, self._spec))
        return sandbox


def _report(bug: Bug, handed: Handed, verdict: Verdict) -> Report:
    return Report(
        module=bug.module,
        kind=str(bug.kind),
        passed=sum(verdict.passed),
        tests=len(verdict.passed),
        flags=(*handed.flags, *verdict.flags),
        forbidden=handed.forbidden,
        source=(handed.source or b"").decode(errors="replace"),
    )


def _summary(report: Report) -> str:
    """The last observation; the episode is over."""
    notes = [f"forbidden: {text}" for text in report.forbidden] + [f"seen: {text}" for text in report.flags]
    return "\n".join([f"{report.passed} of {report.tests} tests pass", *notes[:MOST_NOTES]])


def report_of(artifact: bytes) -> Mapping[str, Any]:
    """The report in the artifact of a transcript, for reward functions."""
    found: Mapping[str, Any] = json.loads(artifact)
    return found
