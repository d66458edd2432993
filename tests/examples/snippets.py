"""The tasks that people arrive with, each with a real part on the other side."""

import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import words
from field_parts import field_python

import rollart

HERE = Path(__file__).parent
ROWS = [
    {"question": f"{country}?", "answer": city, "number": number}
    for number in range(20)
    for country, city in words.COUNTRIES.items()
]
SERVER = [sys.executable, str(HERE.parent / "mcp_server.py")]
QUESTION = re.compile(r'letter "(.)" appear in the text: "(.*)"')
SMALL: dict[str, Any] = {"max_turn_tokens": 2, "max_context": 64, "environments": 16, "prompt": "{question}"}


def capital(country: str) -> str:
    """Look up the capital of a country.

    Args:
        country: Its English name.
    """
    return words.COUNTRIES[country]


def correct(t: rollart.Transcript) -> float:
    return float(t.final_text == t.prompt["answer"])


def looked_up(t: rollart.Transcript) -> float:
    """A little for using the tool, the rest for the right answer after that."""
    called = any(not call.error for turn in t.turns for call in turn.calls)
    return called * (0.2 + 0.8 * correct(t))


def counts(observations: Sequence[str], chance: random.Random) -> str:
    """Plays `count`: right about half of the time."""
    found = QUESTION.search(observations[0])
    assert found
    letter, text = found.groups()
    return str(text.lower().count(letter)) if chance.random() < 0.4 else str(chance.randrange(5))


def task(name: str) -> rollart.Task:
    match name:
        case "rows":
            return rollart.Task(prompts=ROWS, reward=correct, **SMALL)
        case "functions":
            return rollart.Task(prompts=ROWS, tools=[capital], reward=looked_up, max_turns=3, **SMALL)
        case "mcp":
            tools = rollart.mcp(SERVER, tools=["capital"])
            return rollart.Task(prompts=ROWS, tools=tools, reward=looked_up, max_turns=3, **SMALL)
        case "count":
            short = {"settings": {"min_words": 1, "max_words": 2}}
            python = field_python("fields")
            return rollart.Task(
                "reasoning_gym:letter_counting",
                python=python,
                environment_settings=short,
                max_turns=1,
                **SMALL | {"prompt": "", "max_context": 160},
            )
    raise ValueError(name)


def start(name: str, out: Path) -> dict[str, Any]:
    """The model that a run starts from, and its codec."""
    if name != "count":
        # So few words that a model with random weights is right now and then.
        return {"model": rollart.tiny_model(words.Words.vocabulary), "codec": f"{HERE / 'words.py'}:Words"}
    trained = rollart.sft(
        model=rollart.tiny_model(),
        tasks={name: task(name)},
        demonstrations={name: counts},
        sft={"episodes": 300, "epochs": 6},
        out=out.with_name("sft"),
    )
    return {"model": str(trained.model)}


def run(name: str, out: Path, **changes: Any) -> rollart.Result:
    settings: dict[str, Any] = {
        **start(name, out),
        "batch": {"trajectories": 32, "group_size": 8},
        "trainer": {"learning_rate": 2e-3},
        "tasks": {name: task(name)},
    }
    return rollart.run(out=out, **{**settings, **changes})
