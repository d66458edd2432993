"""The tasks that people arrive with, each with a real part on the other side."""

import sys
from pathlib import Path
from typing import Any

import words

import rollart

HERE = Path(__file__).parent
ROWS = [
    {"question": f"{country}?", "answer": city, "number": number}
    for number in range(20)
    for country, city in words.COUNTRIES.items()
]
SERVER = [sys.executable, str(HERE.parent / "mcp_server.py")]
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


def task(name: str) -> rollart.Task:
    match name:
        case "rows":
            return rollart.Task(prompts=ROWS, reward=correct, **SMALL)
        case "functions":
            return rollart.Task(prompts=ROWS, tools=[capital], reward=looked_up, max_turns=3, **SMALL)
        case "mcp":
            tools = rollart.mcp(SERVER, tools=["capital"])
            return rollart.Task(prompts=ROWS, tools=tools, reward=looked_up, max_turns=3, **SMALL)
    raise ValueError(name)


def run(name: str, **changes: Any) -> rollart.Result:
    settings: dict[str, Any] = {
        "model": rollart.tiny_model(words.Words.vocabulary),
        "codec": f"{HERE / 'words.py'}:Words",
        "batch": {"trajectories": 32, "group_size": 8},
        "trainer": {"learning_rate": 2e-3},
        "tasks": {name: task(name)},
    }
    return rollart.run(**{**settings, **changes})
