"""Python tools: their schemas, what a call may end in, and the formats of calls."""

import asyncio
import threading
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, Field

from rollart.app.naming import tool_path
from rollart.backends.environments import tools
from rollart.backends.environments.chat import ChatEnvironment, ChatTask
from rollart.backends.environments.tool_calls import Call, Malformed, parse
from rollart.backends.environments.tool_dialect import MOST_CALLS
from rollart.backends.environments.tools import as_text, schemas_of
from rollart.config.load import check
from rollart.config.tasks import TaskSettings
from rollart.ports.environment import TextStep
from rollart.types.errors import EnvironmentFault, RequestError
from rollart.types.ids import PromptId
from rollart.types.trajectory import Prompt

RELEASED = threading.Event()


def add(a: int, b: int = 1, unit: Literal["m", "km"] | None = None) -> int | str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b if unit is None else f"{a + b} {unit}"


async def search(query: str) -> dict[str, str]:
    """Search."""
    await asyncio.sleep(0)
    return {"found": query.upper()}


def broken(what: str) -> str:
    """Fail in some way."""
    match what:
        case "exit":
            raise SystemExit(3)
        case "down":
            raise ConnectionError("the service is down")
        case "fault":
            raise EnvironmentFault("no disk")
        case "hang":
            RELEASED.wait(300)
        case "huge":
            return "x" * 10_000_000
        case "stop":
            raise StopIteration
    return str(1 // 0)


class Notes:
    """State of an episode."""

    closed: list[str] = []  # noqa: RUF012 - shared on purpose

    def __init__(self, prompt: Prompt) -> None:
        self.owner = str(prompt.data["question"])
        self.notes: list[str] = []

    def write(self, text: str) -> str:
        """Write a note."""
        self.notes.append(text)
        return f"{self.owner}: {len(self.notes)}"

    async def read(self) -> list[str]:
        """Read all notes."""
        return self.notes

    def close(self) -> None:
        self.closed.append(self.owner)


def episode(*tools: str, **settings: Any) -> ChatEnvironment:
    names = [f"{__name__}:{tool}" for tool in tools]
    task = check(TaskSettings, {"prompts": "x.jsonl", "tools": names, "tool_timeout_s": 60.0, **settings})
    return ChatEnvironment(ChatTask(task, None))


def started(environment: ChatEnvironment, question: str = "q") -> TextStep:
    return run(environment.reset(Prompt(PromptId("1"), "t", 1, {"question": question})))


def run(answer: Any) -> Any:
    if not hasattr(answer, "__await__"):
        return answer

    async def awaited() -> Any:
        return await answer

    return asyncio.run(awaited())


def contents(step: TextStep) -> list[str]:
    assert not isinstance(step.observation, str)
    assert all(message["role"] == "tool" for message in step.observation)
    return [message["content"] for message in step.observation]


def test_a_schema_is_made_of_signature_and_docstring() -> None:
    assert schemas_of(add) == [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Add two numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "integer", "description": "The first."},
                        "b": {"type": "integer", "default": 1, "description": "The second."},
                        "unit": {"anyOf": [{"enum": ["m", "km"], "type": "string"}, {"type": "null"}], "default": None},
                    },
                    "required": ["a"],
                },
            },
        }
    ]
    assert [schema["function"]["name"] for schema in schemas_of(Notes)] == ["read", "write"]


def annotated(query: Annotated[str, Field(description="Words.")], most: Annotated[int, "plain"] = 1) -> str:
    """Search."""
    return query * most


def test_a_description_may_stand_in_the_annotation() -> None:
    (found,) = schemas_of(annotated)
    assert found["function"]["parameters"]["properties"] == {
        "query": {"type": "string", "description": "Words."},
        "most": {"type": "integer", "default": 1},
    }


class Article(BaseModel):
    title: str


@dataclass
class Found:
    articles: list[Article]
    on: date


def test_results_that_are_no_text_become_json() -> None:
    assert as_text({"a": [1, "ü"]}) == '{"a": [1, "ü"]}'
    found = Found([Article(title="Peru")], date(2026, 1, 2))
    assert as_text(found) == '{"articles": [{"title": "Peru"}], "on": "2026-01-02"}'
    assert as_text({"x": threading.Lock}) == f'{{"x": "{threading.Lock}"}}'


def unannotated(a):  # type: ignore[no-untyped-def]
    pass


def positional(a: int, /) -> None:
    pass


def any_number(*numbers: int) -> None:
    pass


def opaque(a: threading.Lock) -> None:
    pass


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        (unannotated, "parameter 'a' of the tool unannotated has no type annotation"),
        (positional, "takes a: int"),
        (any_number, r"takes \*numbers"),
        (opaque, "the parameters of the tool opaque have no JSON schema"),
        (threading.Event().wait, "no type annotation"),
        (lambda: 1, "cannot have the name '<lambda>'"),
        (type("Empty", (), {}), "has no public method"),
    ],
)
def test_what_has_no_schema_is_refused_by_name(tool: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        schemas_of(tool)


def test_an_episode_ends_with_an_answer_without_calls() -> None:
    environment = episode("add", "search")
    first = started(environment)
    assert [message["role"] for message in first.observation] == ["system", "user"]
    step = run(environment.step('add: {"a": 2, "b": 3}\nsearch: peru\n{"name": "add", "arguments": {"a": 1}}'))
    assert contents(step) == ["5", '{"found": "PERU"}', "2"]
    assert [(call.name, call.arguments, call.error) for call in step.calls] == [
        ("add", {"a": 2, "b": 3}, ""),
        ("search", {"query": "peru"}, ""),
        ("add", {"a": 1}, ""),
    ]
    assert run(environment.step("It is 5.")) == TextStep("", done=True)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ('add: {"a": "two"}', "a: input should be a valid integer"),
        ('add: {"c": 1}', "a: field required; c: extra inputs are not permitted"),
        ('add: {"a": 1', "the arguments are not JSON"),
        ("add: 1 2", 'write add: {"a": …'),
        ('{"name": "ad", "arguments": {}}', "there is no tool 'ad' (did you mean add?)"),
        ('{"name": "add", "arguments": 3}', "the arguments are not an object"),
        ("broken: zero", "ZeroDivisionError: integer division or modulo by zero"),
        ("broken: exit", "SystemExit: 3"),
        ("broken: stop", "StopIteration"),
    ],
)
def test_what_goes_wrong_with_a_call_is_told_to_the_model(call: str, told: str) -> None:
    environment = episode("add", "broken")
    started(environment)
    step = run(environment.step(call))
    (content,) = contents(step)
    assert content.startswith("Error: ")
    assert told in content
    assert step.calls[0].error == content.removeprefix("Error: ")
    assert not step.done


@pytest.mark.parametrize(("what", "error"), [("down", ConnectionError), ("fault", EnvironmentFault)])
def test_a_failure_outside_the_reach_of_the_model_is_raised(what: str, error: type[Exception]) -> None:
    environment = episode("broken")
    started(environment)
    with pytest.raises(error):
        run(environment.step(f"broken: {what}"))


def test_a_call_that_hangs_or_returns_megabytes_is_bounded() -> None:
    environment = episode("broken", "search", tool_timeout_s=0.5)
    started(environment)
    hung, found = contents(run(environment.step("broken: hang\nsearch: peru")))
    RELEASED.set()
    assert hung == "Error: no answer within 0.5 s"
    assert found == '{"found": "PERU"}', "other calls of the turn are not affected"
    environment = episode("broken", tool_result_chars=1000)
    started(environment)
    (huge,) = contents(run(environment.step("broken: huge")))
    assert len(huge) < 1100
    assert "9,999,000 characters left out" in huge


def test_only_calls_that_timed_out_count_as_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 2
    monkeypatch.setattr(tools, "MOST_HANGING", most)
    monkeypatch.setattr(tools, "_left", set())
    release, all_run = threading.Event(), threading.Barrier(most + 1, timeout=60)

    def work(number: int) -> int:
        """Work as long as the others."""
        all_run.wait()
        return number

    def hang(number: int) -> int:
        """Hang."""
        release.wait(60)
        return number

    environment = episode(tools=[tool_path(work)])
    started(environment)
    calls = "".join(f"work: {number}\n" for number in range(most + 1))
    assert contents(run(environment.step(calls))) == ["0", "1", "2"], "they are slow, and none hangs"
    environment = episode(tools=[tool_path(hang)], tool_timeout_s=0.1)
    started(environment)
    assert contents(run(environment.step("hang: 1\nhang: 2"))) == ["Error: no answer within 0.1 s"] * most
    hanging = list(tools._left)
    with pytest.raises(EnvironmentFault, match="2 calls of tools hang"):
        run(environment.step("hang: 3"))
    release.set()
    for thread in hanging:
        thread.join()
    assert not tools._left, "they have returned"


def test_a_thread_that_cannot_be_started_is_a_failure_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    environment = episode("add")
    started(environment)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(EnvironmentFault, match="tool add: can't start new thread"):
        run(environment.step('add: {"a": 1}'))


def test_calls_of_a_turn_run_at_once() -> None:
    both = threading.Barrier(2, timeout=60)

    def meet(who: str) -> str:
        """Wait for the other."""
        both.wait()
        return who

    environment = episode(tools=[tool_path(meet)])
    started(environment)
    assert contents(run(environment.step("meet: a\nmeet: b"))) == ["a", "b"]


def test_too_many_calls_are_not_made() -> None:
    environment = episode("add")
    started(environment)
    (told,) = contents(run(environment.step('add: {"a": 1}\n' * (MOST_CALLS + 1))))
    assert "33 calls in one answer" in told


def test_a_class_has_the_state_of_an_episode() -> None:
    Notes.closed.clear()
    one, two = episode("Notes"), episode("Notes")
    started(one, "one")
    started(two, "two")
    assert contents(run(one.step("write: a\nwrite: b"))) == ["one: 1", "one: 2"]
    assert contents(run(two.step("read: {}"))) == ["[]"]
    run(one.close())
    assert Notes.closed == ["one"]


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(RequestError, match="two tools have the name 'add'"):
        episode("add", "add")


@pytest.mark.parametrize(
    ("format", "text", "found"),
    [
        ("hermes", "<think><tool_call>{}</tool_call></think>done", []),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}</tool_call>' * 2, [Call("a", {}), Call("a", {})]),
        ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"b\\": 1}"}</tool_call>', [Call("a", {"b": 1})]),
        ("hermes", '<tool_call>{"name": "a"', [Malformed("the tool call is not closed with </tool_call>")]),
        ("hermes", "<tool_call>[]</tool_call>", [Malformed('a tool call is an object with "name" and "arguments"')]),
        ("llama", '<|python_tag|>{"name": "a", "parameters": {"b": 1}}', [Call("a", {"b": 1})]),
        ("llama", '{"answer": 42}', []),
        ("llama", "[1, 2]", []),
        ("llama", "{not json", []),
        ("llama", "The answer is {}", []),
        ("plain", "note: this is text", []),
    ],
)
def test_formats(format: str, text: str, found: list[Any]) -> None:
    assert parse(format, text, []) == found


def schema(name: str, kind: str) -> Any:
    parameters = {"type": "object", "properties": {"id": {"type": kind}}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("integer", "5", 5),
        ("number", "0.5", 0.5),
        ("boolean", "true", True),
        ("array", '["a", "b"]', ["a", "b"]),
        ("integer", "five", "five"),
        ("string", "5", "5"),
    ],
)
def test_an_only_parameter_has_its_type(kind: str, text: str, value: Any) -> None:
    assert parse("plain", f"look.up: {text}", [schema("look.up", kind)]) == [Call("look.up", {"id": value})]


def test_calls_within_an_unfinished_thought_are_not_made() -> None:
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert parse("hermes", f"<think>I could {call}", []) == []
    assert parse("hermes", f"<think>I could</think>{call}", []) == [Call("a", {})]


@pytest.mark.timeout(60)
def test_a_long_run_of_blanks_is_read_at_once() -> None:
    assert parse("plain", "Answer:" + " " * 300_000 + "x", []) == []


def test_the_first_error_of_a_tool_is_logged_once_in_all_episodes(caplog: pytest.LogCaptureFixture) -> None:
    tools._logged.discard("broken")
    for _ in range(2):
        environment = episode("broken")
        started(environment)
        run(environment.step("broken: zero"))
    assert [record.message for record in caplog.records if "the tool broken" in record.message] == [
        "the tool broken raised an error, which the model gets; others are not logged"
    ]


class Stubborn:
    """Cannot be closed."""

    def look(self) -> str:
        """Look."""
        return ""

    def close(self) -> None:
        raise ValueError("stuck")


def test_a_close_that_fails_leaves_no_connection_of_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []

    class Servers:
        async def leave(self, episode: int) -> None:
            left.append(episode)

    environment = episode("Stubborn")
    started(environment)
    monkeypatch.setattr(environment._task, "servers", Servers())
    with pytest.raises(ValueError, match="stuck"):
        run(environment.close())
    assert left == [environment._number]


def test_closing_an_episode_of_functions_needs_no_event_loop() -> None:
    environment = episode("add")
    started(environment)
    assert environment.close() is None


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "<tool_call>nonsense</tool_call>"),
        ("hermes", '<tool_call>{"name": "a"}<tool_call>{"name": "b"}'),
        ("llama", '{"name": "a", "parameters": '),
        ("llama", '{"name": 3}'),
        ("plain", '{"name": "a", '),
    ],
)
def test_what_looks_like_a_call_is_never_an_answer(format: str, text: str) -> None:
    found = parse(format, text, [])
    assert found
    assert all(isinstance(each, Malformed) for each in found)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1234567890123456789012345678901234567890}',
        '{"query": "\\ud800"}',
        '{"query": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"query": ' + '{"a":' * 800 + "1" + "}" * 800 + "}",
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"query": "\\u0000"}',
    ],
)
@pytest.mark.parametrize("format", ["hermes", "llama", "plain"])
def test_no_arguments_break_an_episode(arguments: str, format: str) -> None:
    """Whatever the model writes, the result is the model's."""
    environment = episode("add", "search", tool_format=format)
    started(environment)
    tool = "add" if '"a": 1' in arguments or "N" in arguments else "search"
    call = f'{{"name": "{tool}", "arguments": {arguments}}}'
    step = run(environment.step(f"<tool_call>{call}</tool_call>" if format == "hermes" else call))
    (content,) = contents(step)
    content.encode()
    msgspec.msgpack.encode(step.calls)
