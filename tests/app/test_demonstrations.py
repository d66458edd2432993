"""Demonstrations with tools: the tokens of a conversation are those that a rollout with the same texts has."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import parrot
import pytest

import rollart as api
from rollart.app.demonstrations import read_demonstrations, teaching_codec
from rollart.app.players import Played, PlayedTask
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.ports.environment import TextStep
from rollart.tasks.tokenizer import build_tokenizer, tokenizer_files
from rollart.types.errors import RequestError
from rollart.types.ids import PromptId
from rollart.types.trajectory import Prompt
from rollart.types.transcript import Transcript

TEMPLATE = (
    "{% if tools %}{{ '<|user|>write <tool_call>, ' + tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|agent|>' + m.content + '<|end|>' }}"
    "{% else %}{{ '<|user|>' + m.role + m.get('name', '') + ' ' + m.content | trim }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|agent|>' }}{% endif %}"
)
ROW = {"question": " the capital of Peru? \n"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def search(query: str) -> str:
    """Search."""
    return f" {query} has Lima \n"


def right(t: Transcript) -> float:
    return float("Lima" in t.final_text)


class Safe:
    """An environment with tools; it shows messages."""

    @property
    def tools(self) -> Any:
        return (self.dial,)

    def reset(self, prompt: Prompt) -> TextStep:
        return TextStep(f"safe {prompt.seed}")

    def dial(self, number: int) -> str:
        """Dial."""
        return str(number)

    def finish(self, answer: str) -> TextStep:
        return TextStep("", float(answer == "open"), done=True)

    def close(self) -> None:
        pass


def config_of(task: dict[str, Any], folder: Path, codec: str) -> RunConfig:
    """A codec without roles (`bytes`), one whose template describes tools, or one whose template does not."""
    model: Any = parrot.CONFIG["model"]
    if codec != "bytes":
        for name, data in tokenizer_files(build_tokenizer(["search", "say a"])).items():
            (folder / name).write_bytes(data)
        template = TEMPLATE if codec == "hermes" else TEMPLATE.partition("{% endif %}")[2]
        (folder / "chat_template.jinja").write_text(template)
        model = str(folder)
    limits = {"max_turn_tokens": 100, "max_context": 4096}
    tables = {"tasks": {"qa": limits | task}, "pools": {"local": {}}, "batch": parrot.CONFIG["batch"], "model": model}
    return check(RunConfig, tables)


def qa(**settings: Any) -> dict[str, Any]:
    tools = [f"{__name__}:search"]
    return {"prompts": "rows.jsonl", "reward": f"{__name__}:right", "tools": tools, "prompt": "{question}", **settings}


def played(config: RunConfig, *answers: str, data: dict[str, Any] | None = None) -> Played:
    left = list(answers)

    def player(observations: Sequence[str], chance: random.Random) -> str:  # noqa: ARG001
        return left.pop(0)

    with PlayedTask(config, "qa", teaching_codec(config).answer) as task:
        found = task.play(Prompt(PromptId("1"), "qa", 1, data or {}), player, 0)
    assert isinstance(found, Played)
    return found


def read(config: RunConfig, *lines: Any) -> list[Any]:
    Path("demos.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_demonstrations(config, ["demos.jsonl"], lambda _: None)


CALLS = {"bytes": "search: Peru", "described": "search: Peru"}
CALLS["hermes"] = '<tool_call>{"name": "search", "arguments": {"query": "Peru"}}</tool_call>'


@pytest.mark.parametrize("codec", ["bytes", "hermes", "described"])
def test_messages_have_the_tokens_of_a_rollout_with_tools(codec: str, folder: Path) -> None:
    config = config_of(qa(), folder, codec)
    rollout = played(config, CALLS[codec], "It is Lima.", data=ROW)
    messages = [
        {"role": "user", "content": ROW["question"]},
        {"role": "assistant", "content": CALLS[codec]},
        {"role": "tool", "name": "search", "content": search("Peru")},
        {"role": "assistant", "content": "It is Lima."},
    ]
    (found,) = read(config, {"messages": messages})
    assert found.sequences == rollout.sequences
    first = teaching_codec(config).text(found.sequences[0][0][0])
    assert "search" in first, "the tools are described"


def test_messages_of_an_environment_have_the_tokens_of_a_rollout(folder: Path) -> None:
    config = config_of({"environment": f"{parrot.__file__}:Parrot"}, folder, "hermes")
    rollout = played(config, "b", "c")
    messages = [
        {"role": role, "content": content}
        for role, content in (("user", "say b"), ("assistant", "b"), ("user", "say c"), ("assistant", "c"))
    ]
    assert read(config, {"messages": messages})[0].sequences == rollout.sequences


@pytest.mark.parametrize("answers", [["open"], ['dial: {"number": 1}', "open"]])
def test_transcripts_of_environments_that_show_messages_are_refused(answers: list[str], folder: Path) -> None:
    config = config_of({"environment": f"{__name__}:Safe"}, folder, "bytes")
    kept = json.loads(played(config, *answers).transcript.to_json())
    with pytest.raises(RequestError, match=r"demos\.jsonl:1: .* shows messages, which transcripts keep as text only"):
        read(config, kept)
    said = [{"role": "user", "content": "safe 1"}, {"role": "tool", "content": "1"}]
    with pytest.raises(RequestError, match="the tools of an environment are known when it is played; give a player"):
        read(config, {"messages": [*said, {"role": "assistant", "content": "open"}]})


def test_tools_of_servers_are_left_to_players(folder: Path) -> None:
    config = config_of(qa(tools=[api.mcp(["my-db-server"])]), folder, "bytes")
    turn = {"observation": "q", "action": "Lima"}
    for line in ({"messages": [{"role": "user", "content": "q"}]}, {"turns": [turn], "prompt": ROW}):
        with pytest.raises(RequestError, match=r"demos\.jsonl:1: the tools of MCP servers .* give a player"):
            read(config, line)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "there are no messages"),
        ([{"role": "user", "content": "a"}, *[{"role": "assistant", "content": "b"}] * 2], "an answer must follow"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "search"}}]}],
            "tool_calls are not read",
        ),
    ],
)
def test_conversations_that_no_rollout_has_are_refused(messages: Any, problem: str, folder: Path) -> None:
    with pytest.raises(RequestError, match=rf"demos\.jsonl:1: .*{problem}"):
        read(config_of(qa(), folder, "bytes"), {"messages": messages})


def test_only_newlines_end_a_line(folder: Path) -> None:
    config = config_of(qa(), folder, "bytes")
    text = "a\u2028b\u0085c\x0cd"
    rows = [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]
    Path("demos.jsonl").write_text(json.dumps({"messages": rows, "reward": "0.5"}, ensure_ascii=False))
    (found,) = read_demonstrations(config, ["demos.jsonl"], lambda _: None)
    assert text in bytes(token for token in found.sequences[0][0][0] if token < 256).decode()
    assert found.reward == 0.5
    Path("demos.jsonl").write_bytes(b'{"messages": "\xff"}')
    with pytest.raises(RequestError, match=r"demos\.jsonl:1 is not JSON"):
        read_demonstrations(config, ["demos.jsonl"], lambda _: None)
    with pytest.raises(RequestError, match=r"demos\.jsonl:1: .*float"):
        read(config, {"messages": rows, "reward": [1]})
