"""Reward functions for the tests of their servers, and requests to them."""

import json
from pathlib import Path
from typing import Any

CODE = '''
import asyncio
import threading
import rollart

CALLS = []
GATE = threading.Event()
ENTERED = threading.Semaphore(0)


def correct(t: rollart.Transcript) -> float:
    CALLS.append(t.trajectory)
    return float(t.final_text == t.prompt["answer"])


async def judged(t: rollart.Transcript) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"clear": 0.5, "short": len(t.final_text)}


def longest(group: list[rollart.Transcript]) -> list[float]:
    return [float(len(t.final_text)) for t in group]


def gated(t: rollart.Transcript) -> float:
    """Waits until the test opens the gate."""
    CALLS.append(t.trajectory)
    ENTERED.release()
    assert GATE.wait(100)
    return 1.0


async def endless(t: rollart.Transcript) -> float:
    CALLS.append(t.trajectory)
    ENTERED.release()
    await asyncio.Event().wait()


def wrong(t: rollart.Transcript) -> float:
    CALLS.append(t.trajectory)
    return float("nan")


def outage(t: rollart.Transcript) -> float:
    CALLS.append(t.trajectory)
    raise OSError("the database is away \\ud800")


def misspelt(t: rollart.Transcript) -> float:
    return no_such_name


def leaving(t: rollart.Transcript) -> float:
    raise SystemExit(3)


async def cancelling(t: rollart.Transcript) -> float:
    raise asyncio.CancelledError


def many(t: rollart.Transcript) -> dict[str, float]:
    return {f"part {number}": 1.0 for number in range(20_000)}
'''
SECRET = "a-secret-for-tests"
PATIENCE_S = 250.0


def write_functions(folder: Path) -> Path:
    file = folder / "served_rewards.py"
    file.write_text(CODE)
    return file


def transcript(trajectory: int = 1, text: str = "42", answer: str = "42") -> dict[str, Any]:
    turns = [{"observation": "What is 6 * 7?", "action": text}]
    return {
        "task": "math",
        "trajectory": trajectory,
        "prompt_id": "9",
        "seed": 9,
        "member": 0,
        "prompt": {"answer": answer},
        "turns": turns,
    }


def call(number: int, *transcripts: dict[str, Any]) -> dict[str, Any]:
    return {"key": f"{number}/reward", "transcripts": list(transcripts or [transcript(number)])}


def request(*calls: dict[str, Any], deadline_s: float = PATIENCE_S) -> bytes:
    return json.dumps({"calls": calls or [call(1)], "deadline_s": deadline_s}).encode()
