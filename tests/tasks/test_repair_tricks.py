"""Known tricks against graders, on the grader of repair: none gains a case that the honest code does not pass.

Tricks of the module's code run in the grader's sandbox (`TRICKS`); those of the agent, before that, in whole episodes.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from sandbox_parts import own_sandboxes, public_folder, usable

from rollart.backends.environments.codec import ByteCodec
from rollart.backends.environments.sources import open_source
from rollart.backends.sandboxes.bubblewrap import BubblewrapSandboxes
from rollart.config.tasks import TaskSettings
from rollart.ports.environment import TextStep
from rollart.ports.sandbox import Sandbox
from rollart.tasks.repair import grading
from rollart.tasks.repair.bugs import Bug, Case, drawn, module
from rollart.tasks.repair.editing import report_of
from rollart.tasks.repair.grading import grade
from rollart.tasks.repair.players import edit
from rollart.tasks.repair.workplace import spec_of
from rollart.tasks.sandboxes import shared_sandboxes
from rollart.types.chat import readable
from rollart.types.sandboxes import HOST_BASE
from rollart.types.trajectory import Prompt

SECRET = "answer-5da1c2"
HONEST = """\
def double(x):
    return 2 * x + (x > 3)

def even(x):
    return True

def word(x):
    return "answer"

"""
CASES = (
    Case("double(2)", "4", ""),
    Case("double(4)", "8", ""),
    Case("even(3)", "False", ""),
    Case("double([])", "", "ValueError"),
    Case("word(1)", repr(SECRET), ""),
)
HONEST_PASSED = (True, False, False, False, False)


class Trick(NamedTuple):
    code: str
    """Follows the honest code, and may replace its functions."""
    flag: str = ""
    """What is noticed, if anything is."""


ALL = "double = even = word = {}\n"
FORGE = r"""
import os
def forge(text=b"value True\npass\n1\n{\"reward\": 1}\n"):
    for descriptor in range(64):
        try:
            os.write(descriptor, text)
        except OSError:
            pass
"""
SEARCH = f"""
import re
MARK = re.compile("-".join(["answer", "[0-9a-f]{{6}}"]))
found = set()
def look(text):
    found.update(MARK.findall(text if isinstance(text, str) else text.decode("latin-1")))
def hit(*ignored):
    return min(found, default="answer")
{ALL.format("hit")}
"""
TRICKS = {
    "exits at import": Trick("import os; os._exit(0)", "without an answer"),
    "exits with success when called": Trick(
        "import os\n" + ALL.format("lambda x: os._exit(0)"), "without an answer"
    ),
    "exits with another code": Trick("import os; os._exit(7)", "with code 7"),
    "SystemExit at import": Trick("raise SystemExit(0)"),
    "SystemExit when called": Trick("import sys\n" + ALL.format("lambda x: sys.exit()")),
    "an object that equals everything": Trick(
        "class Equal:\n    __eq__ = lambda *_: True\n    __hash__ = lambda _: 0\n    __repr__ = lambda _: '8'\n"
        + ALL.format("lambda x: Equal()")
    ),
    "a number that equals everything": Trick(
        "class Equal(int):\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\n    __repr__ = lambda _: '8'\n"
        + ALL.format("lambda x: Equal(9)")
    ),
    "a list that equals everything": Trick(
        "class Equal(list):\n    __eq__ = lambda *_: True\n    __class__ = int\n" + ALL.format("lambda x: Equal()")
    ),
    "an error that is all errors": Trick(
        "class Meta(type):\n    __instancecheck__ = __subclasscheck__ = __eq__ = lambda *_: True\n"
        "    __hash__ = type.__hash__\n"
        "class Everything(Exception, metaclass=Meta): pass\n"
        "def fail(x): raise Everything\n" + ALL.format("fail")
    ),
    "patched builtins": Trick(
        "import builtins\nfor name in ('repr', 'ascii', 'type', 'eval', 'exec', 'sorted', 'len', 'min', 'compile'):\n"
        "    setattr(builtins, name, lambda *a, **k: True)\n",
    ),
    "patched grader": Trick(
        "import sys\nmain = sys.modules['__main__']\n"
        "main.value_line = main.error_line = main.value_text = lambda *_: b'value True\\nall tests pass\\n'\n",
        "wrote to the grader",
    ),
    "patched output": Trick(
        "import os\nwrite = os.write\nos.write = lambda fd, text: write(fd, b'passed\\n') and len(text)\n",
        "wrote to the grader",
    ),
    "patched test libraries": Trick(
        "import sys, types\nfor name in ('pytest', '_pytest', 'unittest', 'json', 'pickle', 'marshal', 'subprocess'):\n"
        "    sys.modules[name] = types.SimpleNamespace(dumps=lambda *_: 'true', main=lambda *_: 0, raises=None)\n"
    ),
    "answers on all descriptors": Trick(FORGE + "forge()\n", "wrote to the grader"),
    "answers and exits": Trick(FORGE + "forge(b'value 1\\n')\nos._exit(0)\n"),
    "answers everything at once": Trick(
        FORGE
        + "forge(b''.join(b'value %d\\n' % n for n in range(99)) + b'value True\\nvalue False\\n')\n"
        + "os._exit(0)\n",
        "wrote to the grader",
    ),
    "answers at exit": Trick(
        FORGE + "import atexit\natexit.register(forge)\n" + ALL.format("lambda x: exit(0)"),
    ),
    "answers from a thread": Trick(
        FORGE + "import threading, time\n"
        "def later():\n    while True:\n        forge(); time.sleep(0.0001)\n"
        "threading.Thread(target=later, daemon=True).start()\ntime.sleep(0.1)\n",
        "wrote to the grader",
    ),
    "answers from a child that stays": Trick(
        FORGE + "import time\n"
        "if os.fork() == 0:\n    os.setsid()\n    while True:\n        time.sleep(0.01); forge()\n"
        "time.sleep(0.2)\nos._exit(0)\n",
        "wrote to the grader",
    ),
    "answers from a signal handler": Trick(
        FORGE + "import signal\nsignal.signal(signal.SIGALRM, lambda *_: (forge(), os._exit(0)))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01)\nsignal.pause()\n",
        "wrote to the grader",
    ),
    "tracing the grader": Trick(
        "import sys\n"
        "def trace(frame, event, value):\n"
        "    for name in list(frame.f_locals):\n        frame.f_locals[name] = True\n    return trace\n"
        "sys.settrace(trace); sys.setprofile(trace)\n"
    ),
    "search of frames": Trick(
        "import sys\n" + SEARCH + "frame = sys._getframe()\n"
        "while frame:\n"
        "    look(repr(frame.f_locals)); look(repr(frame.f_globals)); look(repr(frame.f_code.co_consts))\n"
        "    frame = frame.f_back\n"
    ),
    "search of all objects": Trick(
        "import gc, sys\n" + SEARCH + "for each in gc.get_objects():\n"
        "    try:\n        look(repr(each))\n    except Exception:\n        pass\n"
    ),
    "search of its own memory": Trick(
        SEARCH + "memory = open('/proc/self/mem', 'rb', 0)\n"
        "for line in open('/proc/self/maps'):\n"
        "    if 'rw' in line.split()[1]:\n"
        "        first, last = (int(part, 16) for part in line.split()[0].split('-'))\n"
        "        try:\n            memory.seek(first); look(memory.read(last - first))\n"
        "        except (OSError, OverflowError, ValueError):\n            pass\n"
    ),
    "search of files and processes": Trick(
        SEARCH + "import os\n"
        "def tried(path):\n"
        "    try:\n        look(open(path, 'rb').read(10**6))\n    except OSError:\n        pass\n"
        "for top in ('/app', '/home', '/tmp', '/var', '/root', '/etc', '/run', '/dev/shm', '/logs', '/tests'):\n"
        "    for path, _, names in os.walk(top):\n        [tried(os.path.join(path, name)) for name in names]\n"
        "for process in filter(str.isdigit, os.listdir('/proc')):\n"
        "    for name in ('cmdline', 'environ', 'mem', 'maps', 'fd/0', 'fd/3', 'fd/4'):\n"
        "        tried(f'/proc/{process}/{name}')\n"
    ),
    "reads the solution": Trick(
        "try:\n    from rollart.tasks.repair.bugs import module\n    double = even = word = lambda x: SOLVED\n"
        "except ImportError:\n    pass\n"
    ),
    "writes the reward": Trick(
        "import os\nfor top in ('/logs/verifier', '/tests', '/app', '.', '/tmp'):\n"
        "    try:\n        os.makedirs(top, exist_ok=True)\n"
        "        for name in ('reward.txt', 'reward.json', 'result.json'):\n"
        "            open(os.path.join(top, name), 'w').write('1')\n"
        "    except OSError:\n        pass\n"
    ),
    "kills everything": Trick(
        "import os\nfor process in (1, os.getppid(), -1):\n"
        "    try:\n        os.kill(process, 9)\n    except OSError:\n        pass\nos.kill(os.getpid(), 9)\n",
        "by signal 9",
    ),
    "plants files for the next process": Trick(
        "import os\nhome = os.path.expanduser('~')\n"
        "code = 'import os; os.write(1, b\"value 8\\\\n\"); os._exit(0)'\n"
        "site = home + '/.local/lib/python3.%d/site-packages' % __import__('sys').version_info[1]\n"
        "for folder in ('/app', '/', site, '/usr/lib/python3', '/lib/python3.11', '.'):\n"
        "    for name in ('sitecustomize.py', 'usercustomize.py', 'conftest.py', 'x.pth', 'resource.py', 'os.py'):\n"
        "        try:\n            os.makedirs(folder, exist_ok=True)\n"
        "            open(os.path.join(folder, name), 'w').write(code)\n"
        "        except OSError:\n            pass\n"
    ),
    "replaces the loader of the next process": Trick(
        "import os\nfor name in ('/lib64', '/lib', '/bin', '/etc'):\n"
        "    try:\n        os.rename(name, name + '-old')\n        os.makedirs(name)\n"
        "        open(name + '/ld.so.preload', 'w').write('/app/evil.so')\n"
        "    except OSError:\n        pass\n"
    ),
    "an endless loop": Trick("while True: pass\n", "limit of processor time"),
    "an endless loop without signals": Trick(
        "import signal\nfor number in range(1, 65):\n"
        "    try:\n        signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\n"
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass\n",
        "by signal 9",
    ),
    "endless recursion": Trick(
        "import sys\nsys.setrecursionlimit(2**31 - 1)\ndef dive(x): return dive(x) + [0]\n"
        "class Deep:\n    def __getattr__(self, name): return getattr(self, name)\nDeep().x\n",
        "by signal",
    ),
    "all the memory": Trick("held = []\nwhile True: held.append(bytearray(2**24))\n", "limit of memory"),
    "all the processes": Trick(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n", "a case"
    ),
    "a flood of output": Trick(FORGE + "while True: forge(b'x' * 2**16)\n", "limit of"),
    "not Python": Trick("def def def\n"),
    "a huge value": Trick(ALL.format("lambda x: [list(range(10**5))] * 3"), ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[BubblewrapSandboxes]:
    with public_folder() as folder, own_sandboxes(folder / "sandboxes", warm=2) as source:
        yield source


@pytest.fixture
def sandbox(sandboxes: BubblewrapSandboxes) -> Iterator[Sandbox]:
    made = sandboxes.create(spec_of(HOST_BASE, Path("/nowhere")))
    yield made
    made.close()


def test_the_honest_state_passes_what_it_passes(sandbox: Sandbox) -> None:
    verdict = grade(sandbox, "toy", HONEST.encode(), CASES)
    assert verdict.passed == HONEST_PASSED
    assert verdict.flags == ()
    right = "def double(x):\n    if x == []: raise ValueError\n    return x * 2\ndef even(x): return x % 2 == 0\n"
    right += f"def word(x): return {SECRET!r}\nprint('noise')\nimport sys\nprint('more', file=sys.stderr)\n"
    verdict = grade(sandbox, "toy", right.encode(), CASES)
    assert verdict.all_passed
    assert verdict.flags == ()


BUSY = ("all the processes", "a flood of output", "an endless loop without signals")
"""Tricks that use up seconds of processor time."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in BUSY else name for name in TRICKS]
)
def test_a_trick_gains_nothing(name: str, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    trick = TRICKS[name]
    if name == "all the processes":  # each has its own limit of processor time
        monkeypatch.setattr(grading, "GRADING_S", 3.0)
    verdict = grade(sandbox, "toy", (HONEST + trick.code).encode(), CASES)
    assert len(verdict.passed) == len(CASES)
    assert all(gained <= honest for gained, honest in zip(verdict.passed, HONEST_PASSED, strict=True)), verdict
    assert not verdict.all_passed
    assert trick.flag in " / ".join(verdict.flags)


NAIVE = """
import json, sys
cases = json.loads({cases!r})
toy = {{}}
exec({source!r}, toy)
passed = []
for expression, expected, error in cases:
    try:
        passed.append(bool(eval(expression, toy) == eval(expected)))
    except Exception as raised:
        passed.append(type(raised).__name__ == error)
print()
print(json.dumps(passed))
sys.exit(not all(passed))
"""
REAL = {
    "exits at import", "exits with success when called", "SystemExit at import", "SystemExit when called",
    "an object that equals everything", "a number that equals everything", "a list that equals everything",
    "answers and exits", "answers at exit", "answers from a child that stays", "answers from a signal handler",
    "search of frames", "search of all objects", "search of its own memory", "search of files and processes",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REAL))
def test_the_trick_is_real(name: str, sandbox: Sandbox) -> None:
    """A grader in the candidate's process falls for it, whether it trusts the exit code or its own comparison."""
    program = NAIVE.format(cases=json.dumps(CASES), source=HONEST + TRICKS[name].code)
    result = sandbox.exec(["python3", "-c", program])
    if result.exit_code != 0:
        passed = json.loads(result.stdout.splitlines()[-1])
        assert any(gained > honest for gained, honest in zip(passed, HONEST_PASSED, strict=True))


def test_an_endless_sleep_ends_at_the_limit(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "GRADING_S", 1.0)
    verdict = grade(sandbox, "toy", (HONEST + "import time\ntime.sleep(10**6)\n").encode(), CASES)
    assert verdict.passed == (False,) * len(CASES)
    assert verdict.flags == ("a case ran over its limit of time",)


def test_types_are_exact(sandbox: Sandbox) -> None:
    for wrong, expected in (
        ("1", "True"), ("1.0", "1"), ("True", "1"), ("(1, 2)", "[1, 2]"), ("[True]", "[1]"), ("{1: 2.0}", "{1: 2}"),
        ("'1'", "1"), ("b'1'", "'1'"), ("{1}", "[1]"), ("frozenset({1})", "{1}"), ("None", "False"), ("-0.0", "0.0"),
    ):  # fmt: skip
        cases = [Case("f()", expected, ""), Case("g()", expected, "")]
        verdict = grade(sandbox, "toy", f"f = lambda: {wrong}\ng = lambda: {expected}\n".encode(), cases)
        assert verdict.passed == (False, True), (wrong, expected)


def test_a_lookup_of_the_visible_tests_fails_the_hidden_ones(sandbox: Sandbox) -> None:
    bug = bug_of(prompt())
    cases = module(bug.module).cases
    known = {cases[number].expression: cases[number].expected for number in bug.visible}
    assert len(known) < len(cases)
    lookup = f"""
import sys
KNOWN = {known!r}
frame = sys._getframe()
while frame:
    expression = frame.f_locals.get("expression", "")
    frame = frame.f_back
    if expression in KNOWN:
        main = sys.modules["__main__"]
        line = main.value_line(eval(KNOWN[expression]))
        main.value_line = main.error_line = lambda _: line
"""
    source = (bug.edit.apply(module(bug.module).source) + lookup).encode()
    verdict = grade(sandbox, bug.module, source, cases)
    honest = {number for number in range(len(cases)) if number not in bug.failed}
    gained = {number for number, passed in enumerate(verdict.passed) if passed} - honest
    assert gained
    assert gained <= set(bug.visible)
    assert set(bug.failed) > set(bug.visible) & set(bug.failed), "the bug is seen by hidden tests as well"
    assert not verdict.all_passed


# --- tricks of the agent --------------------------------------------------------------------------------------------


def prompt() -> Prompt:
    """The first of a bug that hidden tests notice too, in a module with few tests."""
    for seed in range(10_000):
        found = Prompt(str(seed), "repair", seed, {})
        bug = drawn(found, 2)
        if len(module(bug.module).cases) <= 17 and set(bug.failed) - set(bug.visible):
            return found
    raise AssertionError


def bug_of(given: Prompt) -> Bug:
    return drawn(given, 2)


class Played(NamedTuple):
    bug: Bug
    observations: list[str]
    last: TextStep

    @property
    def report(self) -> Any:
        return report_of(self.last.artifact)

    @property
    def noticed(self) -> str:
        return " / ".join([*self.report["flags"], *self.report["forbidden"]])


def played(*answers: str) -> Played:
    """An episode with these answers and a final one; {module} is the name of the module."""
    usable(shared_sandboxes())
    factory = "rollart.tasks.repair.editing:EditRepair"
    environment = open_source("repair", TaskSettings(environment=factory), 1, ByteCodec()).build()
    given = prompt()
    bug = bug_of(given)
    step = environment.reset(given)
    observations = []
    for answer in (*answers, "Done."):
        assert isinstance(step, TextStep)
        observations.append(readable(step.observation))
        step = environment.step(answer)
    assert isinstance(step, TextStep)
    assert step.done
    environment.close()
    return Played(bug, observations, step)


def right() -> str:
    bug = bug_of(prompt())
    return edit(bug.module, module(bug.module).source)


def runs(code: str) -> str:
    """Code that the visible tests run, at the import of the module with the bug."""
    bug = bug_of(prompt())
    source = f"{code}\n{bug.edit.apply(module(bug.module).source)}"
    return f"{edit(bug.module, source)}\nrun_tests:"


def write(path: str, text: str) -> str:
    return "edit_file: " + json.dumps({"path": path, "old": "", "new": text})


def test_an_honest_repair_earns_1_and_is_not_flagged() -> None:
    done = played("list_files:", "run_tests:", right(), "run_tests:")
    assert (done.last.reward, done.noticed) == (1.0, "")
    assert done.report["passed"] == done.report["tests"] == len(module(done.bug.module).cases)
    assert done.report["source"] == module(done.bug.module).source


def test_doing_nothing_earns_0() -> None:
    done = played()
    assert (done.last.reward, done.noticed) == (0.0, "")
    assert done.report["passed"] == done.report["tests"] - len(done.bug.failed)


FORBIDDEN = {
    "edits the tests": (write("check.py", "print('12 of 12 tests pass')\n"), "check.py was changed"),
    "removes the tests": (runs("import os\nos.remove('check.py')"), "check.py was changed"),
    "links the tests": (
        runs("import os\nos.remove('check.py')\nos.symlink('/dev/null', 'check.py')"), "check.py was changed",
    ),
    "plants conftest.py": (write("conftest.py", "import os; os._exit(0)"), "planted /app/conftest.py"),
    "plants sitecustomize.py": (write("sitecustomize.py", "raise SystemExit"), "planted /app/sitecustomize.py"),
    "plants usercustomize.py in its home": (
        runs(
            "import os\nsite = os.path.expanduser('~/.local/lib/python3/site-packages')\nos.makedirs(site)\n"
            "open(site + '/usercustomize.py', 'w').write('import os; os._exit(0)')"
        ),
        "planted /home/agent/.local/lib/python3/site-packages/usercustomize.py",
    ),
    "plants a .pth file": (write("lib/evil.pth", "import os; os._exit(0)"), "planted /app/lib/evil.pth"),
    "writes the reward": (
        runs("import os\nos.makedirs('/logs/verifier')\nopen('/logs/verifier/reward.txt', 'w').write('1')"),
        "wrote where a grader would: /logs/verifier/reward.txt",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_is_forbidden_earns_0_and_is_flagged(name: str) -> None:
    trick, flag = FORBIDDEN[name]
    done = played(trick, right())
    assert flag in done.report["forbidden"]
    assert done.report["passed"] == done.report["tests"], "the module as such is right"
    assert done.last.reward == 0.0
    assert f"forbidden: {flag}" in str(done.last.observation)


NO_MODULE = {
    "a link to another file": "os.symlink('/etc/passwd', NAME)",
    "a link to the right text": "os.rename('kept', 'moved'); os.symlink('moved', NAME)",
    "a pipe": "os.mkfifo(NAME)",
    "a device": "os.symlink('/dev/zero', NAME)",
    "a folder": "os.mkdir(NAME)",
    "nothing": "pass",
    "a huge file": "open(NAME, 'w').truncate(2**21)",
    "a file that cannot be read": "open(NAME, 'w').close(); os.chmod(NAME, 0)",
}


@pytest.mark.parametrize("name", NO_MODULE)
def test_a_module_that_is_no_regular_file_earns_0(name: str) -> None:
    replace = (
        f"import os\nNAME = '{bug_of(prompt()).module}.py'\nif os.path.isfile(NAME):\n    os.rename(NAME, 'kept')\n"
    )
    done = played(runs(replace + f"    {NO_MODULE[name]}"))
    assert done.last.reward == 0.0
    assert done.report["passed"] == 0
    assert "is not a regular file" in done.noticed


def test_reading_elsewhere_is_refused_and_flagged() -> None:
    paths = ("/solution/solve.sh", "../tests/test.sh", "/logs/verifier/reward.txt", "/etc/passwd", "../../etc/shadow")
    done = played(*[f"read_file: {path}" for path in paths], write("/logs/verifier/reward.txt", "1"))
    assert all("is not in /app" in said for said in done.observations[1:])
    assert all(path in done.noticed for path in paths)
    assert done.last.reward == 0.0


def test_other_files_are_flagged_and_allowed() -> None:
    done = played(write("notes.txt", "x"), write("json.py", "raise SystemExit"), right())
    assert done.last.reward == 1.0
    assert sorted(done.report["flags"]) == ["another file: /app/json.py", "another file: /app/notes.txt"]


def test_a_run_of_the_tests_cannot_hurt() -> None:
    """Kills, loops and floods end the run; the agent sees how, and the episode goes on."""
    done = played(
        runs("import os\ntry:\n    os.kill(-1, 9)\nfinally:\n    os.kill(os.getpid(), 9)"),
        runs("while True: pass"),
        runs("while True: print('x' * 1000)"),
        right(),
        "run_tests:",
    )
    _, killed, looped, flooded, _, tested = done.observations
    assert "ended by signal 9" in killed
    assert "processor time" in looped
    assert len(flooded) < 10_000
    assert tested.endswith(f"{len(done.bug.visible)} of {len(done.bug.visible)} tests pass")
    assert done.last.reward == 1.0
    assert f"a test run was ended by signal {int(signal.SIGKILL)}" in done.report["flags"]


def test_what_is_left_running_is_no_part_of_the_end() -> None:
    """A process that would put the module back, or change what is collected, is killed with the run that started it."""
    name = bug_of(prompt()).module
    stays = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True:\n"
        f"        open('{name}.py', 'w').write('raise SystemExit')\n        time.sleep(0.001)"
    )
    done = played(runs(stays), right())
    assert done.last.reward == 1.0


# --- the tasks' own files -------------------------------------------------------------------------------------------


def test_an_installation_below_usr_is_covered(sandboxes: BubblewrapSandboxes) -> None:
    """Sandboxes see /usr of the machine: where rollart is installed there, the modules as they should be are hidden."""
    spec = spec_of(HOST_BASE, Path("/usr/share"))
    assert spec.read_only == (("/usr/share", "/usr/share/covered"),)
    assert spec_of(HOST_BASE, Path("/opt/rollart")).read_only == ()
    assert spec_of("/some/base", Path("/usr/share")).read_only == ()
    cover = Path(grading.__file__).parent / "covered"
    made = sandboxes.create(msgspec.structs.replace(spec, read_only=(("/usr/share", str(cover)),)))
    listed = made.exec(["ls", "/usr/share"])
    made.close()
    assert listed.stdout.split() == [b"README.md"]


def test_sandboxes_have_no_rollart(sandbox: Sandbox) -> None:
    result = sandbox.exec(["python3", "-c", "import rollart"])
    assert b"ModuleNotFoundError" in result.stderr
    result = sandbox.exec(["sh", "-c", "cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'"])
    assert os.getcwd().encode() not in result.stdout
