"""Word problems with Python in a sandbox: real programs in real sandboxes, and what the agent gets to see of them."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sandbox_parts import kill, usable
from worker_settings import worker_settings

from rollart.backends.environments.host import EnvironmentHost
from rollart.backends.sandboxes.bubblewrap import BubblewrapSandboxes
from rollart.conformance.case import NotApplicable
from rollart.conformance.environment import CASES, EnvironmentHarness
from rollart.tasks.builtin import BUILT_IN
from rollart.tasks.prompts import SeedPrompts
from rollart.tasks.python_math import tool as module
from rollart.tasks.python_math.environment import HINT, RULES, PythonMath
from rollart.tasks.python_math.problems import LEVELS, draw_problem, matching, program_for
from rollart.tasks.python_math.scripts import careless, trusted_environment, with_python
from rollart.tasks.python_math.tool import AT_ONCE, PythonTool, shown
from rollart.tasks.python_math.trusted import value_of
from rollart.tasks.sandboxes import BUBBLEWRAP, shared_sandboxes
from rollart.tasks.scripts import mean_reward, play
from rollart.types.errors import EnvironmentFault, RequestError, SandboxFault, SandboxLost, SandboxUnavailable
from rollart.types.ids import PromptId
from rollart.types.sandboxes import ExecResult, Limits
from rollart.types.tokens import Segment
from rollart.types.trajectory import Prompt

PROBLEM = "Ann has 24 bags of 31 pens and loses 50 pens. How many pens?"


@pytest.fixture
def sandboxes():
    made = shared_sandboxes()
    usable(made)
    assert isinstance(made, BubblewrapSandboxes)
    return made


def asked(problem=PROBLEM, answer=None, **settings):
    environment = PythonMath(**settings)
    data = {"problem": problem} if answer is None else {"problem": problem, "answer": answer}
    first = environment.reset(Prompt("p", "t", 0, data))
    assert first.observation == f"{RULES}\n{problem}"
    return environment


def by_hand(problem=PROBLEM, answer=None):
    """An environment whose programs are not run."""
    return asked(problem, answer, tool=lambda program: f"ran {program}")


# --- what an action is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "program"),
    [
        ("py 24*31-50", "24*31-50"),
        ("I say py 24*31-50\nand more", "24*31-50"),
        ("```python\nx = 24\nx*31\n```", "x = 24\nx*31\n"),
        ("First:\n```\n1+1\n``` then answer 5", "1+1\n"),
        ("```py\nanswer = 5", "answer = 5"),
        ("py answer = 5", "answer = 5"),
        ("```python\n```", ""),
    ],
)
def test_programs(action, program):
    step = by_hand().step(action)
    assert (step.observation, step.reward, step.done) == (f"ran {program}", 0.0, False)


@pytest.mark.parametrize(
    ("action", "reward"),
    [
        ("answer 694", 1.0),
        ("The answer is: 694.", 1.0),
        ("Answer=694.0", 1.0),
        (r"so \boxed{ 694 } py 1", 1.0),
        ("answer 695", 0.0),
        ("answer -694", 0.0),
        ("answer 694 py 24*31-50", 1.0),
    ],
)
def test_an_answer_ends_it(action, reward):
    step = by_hand().step(action)
    assert (step.reward, step.done, step.truncated) == (reward, True, False)


@pytest.mark.parametrize("nonsense", ["", "py", "py\n", "answer", "694", "answer seven", "copy 12", r"\boxed{x}"])
def test_nonsense_is_a_lost_turn(nonsense):
    step = by_hand().step(nonsense)
    assert (step.observation, step.reward, step.done) == (HINT, 0.0, False)


def test_problems_of_a_dataset():
    assert by_hand("What is half of 2,501?", "1,250.5").step("answer 1250.50").reward == 1.0
    assert by_hand("Twice 4?", 8).step("answer 8").reward == 1.0
    with pytest.raises(RequestError, match="number"):
        by_hand("Which colour?", "blue")
    with pytest.raises(RequestError, match="no problem"):
        by_hand("What is half of 2?")
    with pytest.raises(RequestError, match="level 4"):
        PythonMath(4)


def test_it_can_be_closed_at_any_time():
    environment = PythonMath(tool=str)
    environment.close()
    with pytest.raises(EnvironmentFault, match="reset"):
        environment.step("answer 1")


# --- problems -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_text_has_one_kind_and_its_program_the_result(level):
    texts = {draw_problem(level, seed) for seed in range(200)}
    assert len(texts) > 190
    kinds = set()
    for text in texts:
        ((kind, numbers),) = matching(text)
        kinds.add(kind)
        assert kind.text.format(*numbers, thing="", box="").split()[0] == text.split()[0]
        assert LEVELS[level].smallest <= value_of(program_for(text)) <= LEVELS[level].largest
    assert kinds == set(LEVELS[level].kinds)


@pytest.mark.parametrize("level", LEVELS)
def test_scripts_reach_what_the_docs_say(level):
    source = SeedPrompts("t", 0, 100, held_out=True)
    prompts = [source.next() for _ in range(100)]
    reached = {
        name: mean_reward(trusted_environment(level), prompts, script, max_turns=4)
        for name, script in BUILT_IN["python_math"].baselines.items()
    }
    assert reached["with Python"] == 1.0
    assert reached["any answer"] <= reached["in the head"] <= 0.05
    assert 0.4 < reached["careless"] < 0.8


# --- in the sandbox -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sandboxes")
@pytest.mark.parametrize("level", LEVELS)
def test_scripts_see_and_earn_the_same_without_a_sandbox(level):
    """What a cold start imitates is what an agent will see."""
    source = SeedPrompts("t", 0, 6)
    for script in (with_python, careless):
        prompt = source.next()
        real, trusted = PythonMath(level), trusted_environment(level)
        assert play(real, prompt, script, max_turns=4) == play(trusted, prompt, script, max_turns=4)


@pytest.mark.usefixtures("sandboxes")
@pytest.mark.parametrize(
    ("action", "observation"),
    [
        ("py 24*31-50", "694"),
        ("```python\nimport math\nfor k in range(3):\n    print(math.factorial(k + 3))\n```", "6\n24\n120"),
        ("py x = 1", "nothing printed"),
        ("py 'é' * 3", "ééé"),
        ("py 1/0", "ZeroDivisionError: division by zero"),
        ("py 1+", "SyntaxError: invalid syntax"),
        ("py \x00", "ValueError: source code string cannot co..."),
        ("py print('x' * 10**6)", "x" * 40 + "..."),
        ("py 3; import os; os._exit(7)", "exit code 7"),
        ("py import time; print(1, flush=True); time.sleep(60)", "1\ntime limit"),
        ("py 'a' * 10**9", "memory limit"),
        ("py open('/tmp/large', 'wb').write(bytes(10**7))", "disk limit"),
        ("py open('/etc/shadow')", "PermissionError: [Errno 13] Permission d..."),
        (
            "py import socket; socket.create_connection(('1.1.1.1', 80), 1)",
            "OSError: [Errno 101] Network is unreacha...",
        ),
    ],
)
def test_what_a_program_did_is_the_agents_result(action, observation):
    step = asked(time_s=1.0 if "sleep" in action else 30.0).step(action)
    assert (step.reward, step.done) == (0.0, False)
    assert _alike(str(step.observation), observation)


def _alike(seen, expected):
    """Limits of memory and disk show as an error where the machine has no cgroups or the write fails first."""
    kinds = {"memory limit": ("memory limit", "MemoryError"), "disk limit": ("disk limit", "OSError")}
    if "shadow" in expected or "Permission" in expected:
        return seen.startswith(("PermissionError", "FileNotFoundError"))
    return seen == expected or seen.startswith(kinds.get(expected, ("\0",)))


@pytest.mark.usefixtures("sandboxes")
def test_nothing_is_kept_between_programs():
    environment = asked()
    assert environment.step("py kept = open('kept', 'w').write('7')").observation == "nothing printed"
    assert str(environment.step("py open('kept').read()").observation).startswith("FileNotFoundError")
    assert environment.step("py import os; os.listdir('.')").observation == "[]"


def test_a_reset_needs_no_sandbox(sandboxes, monkeypatch):
    PythonMath()  # tries once per process whether there is Python

    def refuse(*_, **__):
        raise AssertionError("a sandbox was created")

    monkeypatch.setattr(sandboxes, "create", refuse)
    environment = asked()
    assert environment.step("answer 694").reward == 1.0
    environment.close()


def test_few_programs_run_at_once_whatever_the_number_of_environments(sandboxes, monkeypatch):
    running, most, lock = set(), [], threading.Lock()
    create = sandboxes.create

    def counted(spec, **options):
        made = create(spec, **options)
        with lock:
            running.add(made.name)
            most.append(len(running))
        close = made.close

        def closed():
            with lock:
                running.discard(made.name)
            close()

        made.close = closed
        return made

    environments = [asked() for _ in range(6 * AT_ONCE)]
    monkeypatch.setattr(sandboxes, "create", counted)
    with ThreadPoolExecutor(len(environments)) as threads:
        steps = list(threads.map(lambda each: each.step("py 24*31-50"), environments))
    assert {step.observation for step in steps} == {"694"}
    assert len(most) == len(environments)
    assert max(most) <= AT_ONCE
    assert running == set()


@pytest.mark.usefixtures("sandboxes")
def test_one_who_waits_too_long_is_an_infrastructure_failure(monkeypatch):
    environment = asked()
    monkeypatch.setattr(module, "_places", threading.BoundedSemaphore(1))
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    module._places.acquire()
    with pytest.raises(SandboxFault, match="other programs"):
        environment.step("py 1")


@pytest.mark.usefixtures("sandboxes")
def test_a_machine_without_python_in_sandboxes_is_refused(monkeypatch):
    monkeypatch.setattr(module, "COMMAND", ("python-of-nobody",))
    with pytest.raises(SandboxUnavailable, match="install python3"):
        PythonTool(BUBBLEWRAP, Limits(memory_mb=61), 40)


@pytest.mark.usefixtures("sandboxes")
@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        (("sleep", "200"), SandboxFault, "does not work in a sandbox: time limit"),
        (("python3", "-I", "-S", "-c", "'a' * 10**9"), (RequestError, SandboxFault), "raise memory_mb|MemoryError"),
    ],
)
def test_limits_in_which_python_does_not_start_are_no_agents_fault(monkeypatch, command, error, message):
    monkeypatch.setattr(module, "COMMAND", command)
    with pytest.raises(error, match=message):
        PythonTool(BUBBLEWRAP, Limits(memory_mb=62, time_s=0.5 if command[0] == "sleep" else 30.0), 40)


def test_a_lost_sandbox_ends_the_episode_and_the_next_one_has_another(sandboxes, monkeypatch):
    """Row 35: killed from outside in the middle of a program. The outcome is no reward; the slot goes on."""
    create, to_kill = sandboxes.create, [True]

    def doomed(spec, **options):
        made = create(spec, **options)
        if to_kill:
            threading.Timer(0.2, kill, [made]).start()
        return made

    environment = asked(time_s=300.0)
    monkeypatch.setattr(sandboxes, "create", doomed)
    with pytest.raises(SandboxLost):
        environment.step("py import time; time.sleep(250)")
    to_kill.clear()
    environment.close()
    assert environment.reset(Prompt("p", "t", 1)).observation
    assert environment.step("py 6*7").observation == "42"


def test_limits_that_were_exceeded_are_named():
    result = ExecResult(exit_code=None, signal=signal.SIGKILL, stdout=b"1", timed_out=True, memory_exceeded=True)
    assert shown(result, 10) == "1\ntime limit\nmemory limit"
    assert shown(ExecResult(exit_code=None, signal=signal.SIGSEGV), 10) == "signal 11"
    assert shown(ExecResult(exit_code=0, stdout=b"\xff", stdout_dropped=9), 10) == "\N{REPLACEMENT CHARACTER}"


# --- the port -------------------------------------------------------------------------------------------------------


def calculating(turn: int) -> Segment:
    return Segment.of(list((f"py {turn}+1" if turn < 4 else "answer 1").encode()))


@pytest.mark.usefixtures("sandboxes")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(case):
    flat = {"task": "t", "environment": "rollart.tasks.python_math.environment:PythonMath", "slots": 3}

    def build(transcripts):
        return lambda wake: EnvironmentHost(
            worker_settings(EnvironmentHost, {**flat, "transcripts": transcripts}), wake
        )

    harness = EnvironmentHarness(
        build=build(transcripts=False),
        prompt=lambda seed: Prompt(id=PromptId(str(seed)), task="t", seed=seed),
        action=calculating,
        virtual=False,
        transcribing=build(transcripts=True),
    )
    try:
        case.run(harness)
    except NotApplicable as reason:
        pytest.skip(str(reason))
