"""Random conversations with tools over the chat templates of real models: the tokens are exact.

Judged by transformers: where its rendering of the whole conversation begins with what it was before and the answer, the
engine has seen exactly that text. Where it does not, the conversation goes on in a new sequence, or the template only
strips whitespace of an answer, which is kept as it was sampled.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from parts import Driver
from template_parts import TEMPLATES, smollm_folder, template_folder
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from rollart.backends.environments.hf_codec import HfCodec
from rollart.backends.environments.host import EnvironmentHost
from rollart.ports.environment import TextStep
from rollart.types.ids import PromptId, TrajectoryId
from rollart.types.messages import Observed, Reset, Step
from rollart.types.tokens import Generated, Segment, TokenSequence, VersionRun
from rollart.types.trajectory import Prompt
from rollart.types.versions import Version

EXTENSIVE = 250
BRIEF = 12
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": 'Add "two" numbers.',
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
WORDS = (
    "go",
    "left",
    " 42 ",
    "\n",
    "\n\n",
    '"',
    "{",
    "}",
    "\\",
    "é",
    "日本",
    "<|im_end|>",
    "<|eot_id|>",
    " ",
    "\t",
    "🙂",
)
SCRIPT: list[TextStep] = []


class Scripted:
    """Shows what the test wrote down."""

    def reset(self, prompt: Prompt) -> TextStep:  # noqa: ARG002
        return SCRIPT[0]

    def step(self, action: str) -> TextStep:  # noqa: ARG002
        return SCRIPT.pop(1)

    def close(self) -> None:
        pass


def text(chance: random.Random) -> str:
    return "".join(chance.choice(WORDS) for _ in range(chance.randint(1, 12))) + "."


def new_messages(chance: random.Random, calls: bool) -> list[dict[str, Any]]:
    if calls:
        return [{"role": "tool", "name": "add", "content": text(chance)} for _ in range(chance.randint(1, 3))]
    return [{"role": "user", "content": text(chance)}]


class Speaker:
    """Samples answers: text in random pieces, calls, thoughts, any tokens at all."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        self.codec = HfCodec(folder)
        added = json.loads(Path(folder, "tokenizer.json").read_text())["added_tokens"]
        self.special = {token["id"] for token in added if token["special"]}
        self.stops = set(self.codec.stop_tokens)

    def ids(self, written: str, chance: random.Random) -> list[int]:
        """Not the tokens that the tokenizer would choose: the text is encoded in random pieces."""
        cuts = sorted(chance.sample(range(len(written)), min(3, len(written))))
        parts = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
        parts = [written] if "<tool_call>" in written or "think>" in written else parts
        ids = [id for part in parts for id in self.tokenizer.encode(part, add_special_tokens=False).ids]
        return [id for id in ids if id not in self.special]

    def answer(self, chance: random.Random) -> tuple[list[int], bool]:
        """Sampled ids, and whether tools are called."""
        calls = chance.random() < 0.5
        written = text(chance)
        if calls:
            written += '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        kind = chance.random()
        if kind < 0.3:
            written = f"<think>\n{text(chance).strip()}\n</think>\n\n{written.strip()}"
        ids = self.ids(written, chance)
        if kind > 0.85:
            ids = [chance.choice(range(self.codec.vocabulary)) for _ in range(chance.randint(0, 20))]
            ids = [id for id in ids if id not in self.special]
        ended = chance.random() < 0.9
        return [*ids, self.codec.stop_tokens[0]] if ended else ids, calls


def squeezed(written: str) -> str:
    return re.sub(r"\s+", "", written)


def converse(folder: str, count: int) -> dict[str, int]:
    speaker, judge = Speaker(folder), AutoTokenizer.from_pretrained(folder)
    settings = {"environment": f"{__name__}:Scripted", "max_turns": 1000}
    driver = Driver(
        EnvironmentHost,
        {"task": "t", "settings": settings, "codec_settings": {"folder": folder}, "slots": 1,
         "codec": "rollart.backends.environments.hf_codec:HfCodec"},
    )  # fmt: skip
    seen = {"appended": 0, "rewritten": 0, "stripped": 0}
    for number in range(count):
        one_conversation(number, speaker, judge, driver, seen)
    driver.worker.close()
    return seen


def one_conversation(number: int, speaker: Speaker, judge: Any, driver: Any, seen: dict[str, int]) -> None:
    chance = random.Random(f"conversation {number}")
    tools = [TOOL] if chance.random() < 0.7 else []
    system = [{"role": "system", "content": text(chance)}] if chance.random() < 0.5 else []
    messages: list[dict[str, Any]] = [*system, *new_messages(chance, calls=False)]
    SCRIPT[:] = [TextStep(list(messages), tools=tools)]
    trajectory = TrajectoryId(number)
    pending = driver.call(Reset(trajectory, 0, Prompt(PromptId("p"), "t", number), 0))
    sequences = [TokenSequence()]
    sampled: list[int] = []
    trained: list[int] = []
    before = ""
    altered = False
    for turn in range(chance.randint(1, 6)):
        (observed,) = pending
        assert isinstance(observed, Observed), observed
        if observed.new_sequence:
            sequences.append(TokenSequence())
        sequences[-1].append_context(observed.observation)
        engine = speaker.tokenizer.decode(sequences[-1].whole().ids().tolist(), skip_special_tokens=False)
        now = judge.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True)
        if not turn or now.startswith(before):
            assert not observed.new_sequence, "the template only appends"
            kind = "appended"
            assert (squeezed(engine) == squeezed(now)) if altered else (engine == now)
        elif observed.new_sequence:
            assert squeezed(engine) == squeezed(now)
            altered = True  # the template strips thoughts with the whitespace around them
            kind = "rewritten"
        else:
            assert squeezed(engine) == squeezed(now), "it may strip whitespace, and nothing else"
            altered = True
            kind = "stripped"
        seen[kind] += 1
        ids, calls = speaker.answer(chance)
        sampled += ids
        runs = (VersionRun(Version(1, 1), len(ids)),) if ids else ()
        sequences[-1].append_sampled(Generated(Segment.of(ids), bytes(4 * len(ids)), runs))
        answer = speaker.tokenizer.decode([id for id in ids if id not in speaker.special], skip_special_tokens=False)
        messages += [{"role": "assistant", "content": answer}, *(new := new_messages(chance, calls))]
        before = now + answer
        SCRIPT.append(TextStep(new))
        pending = driver.call(Step(trajectory, turn + 1, Segment.of(ids)))
    for sequence in sequences:
        whole, mask = sequence.whole().ids().tolist(), sequence.action_mask().tolist()
        trained += [id for id, acted in zip(whole, mask, strict=True) if acted]
    assert trained == sampled, "what is trained is what was sampled"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_few_conversations(name: str, tmp_path: Path) -> None:
    seen = converse(template_folder(tmp_path, name), BRIEF)
    assert seen["appended"] > BRIEF


@pytest.mark.long
@pytest.mark.parametrize("name", [*TEMPLATES, "smollm2"])
def test_conversations(name: str, tmp_path: Path) -> None:
    folder = smollm_folder(tmp_path) if name == "smollm2" else template_folder(tmp_path, name)
    seen = converse(folder, EXTENSIVE)
    print(name, seen)  # noqa: T201 - shown with -s
    assert seen["appended"] > EXTENSIVE
    assert (seen["rewritten"] > 0) == (name == "qwen3"), "only this one drops thoughts"
