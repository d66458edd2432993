"""Environments with tools: their calls are read in the format of the model, made in order, and judged at the end."""

import json
import threading
from pathlib import Path

import pytest
from template_parts import template_folder
from worker_settings import worker_settings

from rollart.backends.environments import tool_environment
from rollart.backends.environments.codec import ByteCodec
from rollart.backends.environments.dialogue import open_dialogue
from rollart.backends.environments.hf_codec import HfCodec
from rollart.backends.environments.host import EnvironmentHost
from rollart.backends.environments.sources import open_source
from rollart.backends.environments.tool_dialect import MOST_CALLS
from rollart.backends.environments.tool_environment import ToolCalling
from rollart.config.tasks import TaskSettings
from rollart.ports.environment import TextStep, ToolError
from rollart.types.chat import readable
from rollart.types.errors import EnvironmentFault
from rollart.types.ids import PromptId
from rollart.types.messages import EnvironmentFailed, Observed, Reset, Step
from rollart.types.tokens import Segment
from rollart.types.trajectory import Prompt

FACTORY = f"{__name__}:Safe"
PROMPT = Prompt(PromptId("1"), "safe", 1, {})
HERMES = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'


class Safe:
    """Dial 1, 2, 3 and open."""

    def __init__(self, *, kind: str = "safe") -> None:
        self.kind = kind
        self.dialled: list[int] = []
        self.closed = False

    @property
    def tools(self):
        return (self.dial, self.look)

    def reset(self, prompt: Prompt) -> TextStep:
        return TextStep(f"A {self.kind}, number {prompt.seed}.")

    def dial(self, number: int, times: int = 1) -> str:
        """Dial a number.

        Args:
            number: From 1 to 9.
            times: How often.
        """
        if number == 13:
            raise EnvironmentFault("the safe burnt down")
        if not 1 <= number <= 9:
            raise ToolError(f"there is no {number}")
        self.dialled += [number] * times
        return " ".join(map(str, self.dialled))

    def look(self) -> str:
        """Look at it."""
        return "steel " * 1000

    def finish(self, answer: str) -> TextStep:
        return TextStep(f"said {answer!r}", float(self.dialled == [1, 2, 3]), done=True, artifact=b"open")

    def close(self) -> None:
        self.closed = True


def test_a_chat_template_describes_the_tools(tmp_path: Path) -> None:
    codec = HfCodec(template_folder(tmp_path, "qwen2_5"))
    environment = open_source("safe", TaskSettings(environment=FACTORY), 1, codec).build()
    assert isinstance(environment, ToolCalling)
    first = environment.reset(PROMPT)
    assert first.observation == [{"role": "user", "content": "A safe, number 1."}]
    tokens = open_dialogue(codec, first.tools).observe(first.observation).tokens
    assert '"name": "dial"' in codec.text(tokens)
    step = environment.step(HERMES.format("dial", '{"number": 4}'))
    assert [(message["role"], message["content"]) for message in step.observation] == [("tool", "4")]


def episode(**settings: object) -> ToolCalling:
    task = TaskSettings(environment=FACTORY, **settings)  # type: ignore[arg-type]
    built = open_source("safe", task, 1, ByteCodec()).build()
    assert isinstance(built, ToolCalling)
    return built


def test_tools_are_described_and_called_in_order() -> None:
    environment = episode()
    first = readable(environment.reset(PROMPT).observation)
    assert 'dial: {"number": integer, "times": integer}. Dial a number.' in first
    assert first.endswith("[user]\nA safe, number 1.")
    step = environment.step('dial: {"number": 1}\ndial: {"number": 2}')
    assert [message["content"] for message in step.observation] == ["1", "1 2"]
    assert [(call.name, call.arguments) for call in step.calls] == [("dial", {"number": 1}), ("dial", {"number": 2})]
    assert not step.done
    environment.step('dial: {"number": 3}')
    last = environment.step("I am done.")
    assert (last.observation, last.reward, last.done, last.truncated) == ("said 'I am done.'", 1.0, True, False)
    assert last.artifact == b"open"


@pytest.mark.parametrize(
    ("format", "call"),
    [
        ("hermes", HERMES.format("dial", '{"number": 4}')),
        ("llama", '{"name": "dial", "parameters": {"number": 4}}'),
        ("plain", 'dial: {"number": 4}'),
    ],
)
def test_calls_are_written_as_the_model_writes_them(format: str, call: str) -> None:
    environment = episode(tool_format=format)
    environment.reset(PROMPT)
    assert readable(environment.step(call).observation) == "[tool dial]\n4"


def test_wrong_calls_are_the_agents_and_the_episode_goes_on() -> None:
    environment = episode()
    environment.reset(PROMPT)
    for call, said in (
        ('dial: {"number": 0}', "there is no 0"),
        ('dial: {"number": "x"}', "number: input should be a valid integer"),
        ('dial: {"nr": 1}', "number: field required"),
        ('dial: {"number": 1', "not JSON"),
        ('{"name": "kick"}', "there is no tool 'kick'"),
        ("look:\n" * (MOST_CALLS + 1), f"make {MOST_CALLS} at most"),
    ):
        step = environment.step(call)
        assert said in readable(step.observation), call
        assert said in step.calls[0].error
        assert not step.done


def test_results_are_cut() -> None:
    environment = episode(tool_result_chars=100)
    environment.reset(PROMPT)
    assert "characters left out" in readable(environment.step("look:").observation)


def test_at_the_last_turn_the_agent_is_judged_by_what_it_did() -> None:
    environment = episode(max_turns=3)
    environment.reset(PROMPT)
    for number in (1, 2):
        assert not environment.step(f'dial: {{"number": {number}}}').done
    last = environment.step('dial: {"number": 3}')
    assert (last.reward, last.done, last.truncated, last.artifact) == (1.0, True, True, b"open")
    assert [message["content"] for message in last.observation] == ["1 2 3", "said ''"]
    assert [call.name for call in last.calls] == ["dial"]


def test_an_answer_at_the_last_turn_is_not_truncated() -> None:
    environment = episode(max_turns=1)
    environment.reset(PROMPT)
    last = environment.step("no")
    assert (last.done, last.truncated) == (True, False)


def test_in_a_host_a_failure_of_a_tool_is_one_of_the_environment() -> None:
    flat = {"task": "safe", "environment": FACTORY, "environment_settings": {"kind": "strongbox"}, "slots": 1}
    awake = threading.Event()
    host = EnvironmentHost(worker_settings(EnvironmentHost, flat), awake.set)

    def answered() -> object:
        while not (events := host.advance(0.0).events):
            assert awake.wait(60)
            awake.clear()
        return events[0]

    host.post([Reset(1, 0, PROMPT, 0)])
    first = answered()
    assert isinstance(first, Observed)
    host.post([Step(1, 1, Segment.of([*json.dumps({"name": "dial", "arguments": {"number": 13}}).encode(), 256]))])
    failed = answered()
    host.close()
    assert "A strongbox, number 1." in ByteCodec().text(first.observation.ids().tolist())
    assert isinstance(failed, EnvironmentFailed)
    assert failed.reason == "EnvironmentFault: the safe burnt down"
    assert not failed.permanent


class Slow(Safe):
    """A clock that a call moves on."""

    now = 0.0

    def dial(self, number: int, times: int = 1) -> str:
        Slow.now += times
        return super().dial(number)


@pytest.mark.parametrize(("limits", "limit"), [({}, 30), ({"step_deadline_s": 20.0}, 10)])
def test_no_call_is_begun_when_those_before_it_took_long(
    limits: dict[str, float], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_environment, "monotonic", lambda: Slow.now)
    environment = ToolCalling(Slow(), TaskSettings(environment=FACTORY, **limits), ByteCodec())
    environment.reset(PROMPT)
    for over in (0, 1):
        calls = f'dial: {{"number": 1, "times": {limit + over}}}\ndial: {{"number": 2}}'
        errors = [call.error for call in environment.step(calls).calls]
        late = f"not made: those before it took more than {limit} s; make fewer at once"
        assert errors == ["", late if over else ""], "a step has its own time"


def test_a_finish_always_ends_the_episode() -> None:
    class Forgetful(Safe):
        def finish(self, answer: str) -> TextStep:
            return TextStep(f"said {answer}")

    for max_turns, answer in ((3, "open"), (1, 'dial: {"number": 1}')):
        settings = TaskSettings(environment=FACTORY, max_turns=max_turns)
        environment = ToolCalling(Forgetful(), settings, ByteCodec())
        environment.reset(PROMPT)
        assert environment.step(answer).done


class Played(Safe):
    """Knows players for `rollart env check`."""

    def random_call(self, seed: int) -> tuple[str, dict[str, int]] | None:
        return ("dial", {"number": seed}) if seed else None

    def scripted_action(self) -> str:
        return "open"


@pytest.mark.parametrize("format", ["hermes", "llama", "plain"])
def test_players_write_calls_as_the_model_does(format: str) -> None:
    settings = TaskSettings(environment=FACTORY, tool_format=format)
    episode = ToolCalling(Played(), settings, ByteCodec())
    episode.reset(PROMPT)
    (call,) = episode.step(str(episode.random_action(4))).calls
    assert (call.name, call.arguments, call.error) == ("dial", {"number": 4}, "")
    assert not ToolCalling(Played(), settings, ByteCodec())._dialect.calls(str(episode.random_action(0)), [])
    assert episode.scripted_action() == "open"
    other = ToolCalling(Safe(), settings, ByteCodec())
    assert (other.random_action(4), other.scripted_action()) == (None, None)
