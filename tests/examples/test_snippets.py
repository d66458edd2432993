"""The snippets of docs/tasks.md: two steps of each, and, as `make test-examples`, that they learn."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import snippets

from rollart.app.transcript_store import read_transcripts
from rollart.types.errors import RequestError

NAMES = ["rows", "functions", "mcp", "count"]


def needs(name: str, runtime: str = "inline") -> None:
    for package in ("mcp",) * (name == "mcp") + ("ray",) * (runtime == "ray"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'rollart[{package}]'")


@pytest.mark.parametrize(
    ("name", "runtime"),
    [
        *((name, "inline") for name in NAMES),
        ("mcp", "ray"),
        *(pytest.param(name, "ray", marks=pytest.mark.long) for name in NAMES if name != "mcp"),
    ],
)
def test_two_steps(name: str, runtime: str, tmp_path: Path) -> None:
    needs(name, runtime)
    result = snippets.run(name, steps=2, out=tmp_path / "run", runtime=runtime, eval_every=2)
    assert result.report.steps == 2
    if name in ("rows", "count"):
        return
    stored = [each.transcript() for each in read_transcripts(tmp_path / "run" / "transcripts")]
    called = [(t, turn, after) for t in stored for turn, after in zip(t.turns, t.turns[1:], strict=False) if turn.calls]
    assert called, "by chance, one of the trajectories calls a tool"
    for t, turn, after in called:
        answers = [f"[tool capital]\n{snippets.words.COUNTRIES[call.arguments['country']]}" for call in turn.calls]
        assert after.observation == "\n\n".join(answers), t


def test_a_closure_is_a_tool_of_this_process_only(tmp_path: Path) -> None:
    asked = []

    def capital(country: str) -> str:
        """Look up the capital of a country."""
        asked.append(country)
        return snippets.words.COUNTRIES[country]

    import rollart

    task = rollart.Task(prompts=snippets.ROWS, tools=[capital], reward=snippets.looked_up, **snippets.SMALL)
    with pytest.raises(RequestError, match=r"capital is a lambda or defined inside a function.*runtime=\"inline\""):
        snippets.run("functions", tasks={"functions": task}, runtime="ray", steps=1, out=tmp_path / "no")
    snippets.run("functions", tasks={"functions": task}, steps=1, out=tmp_path / "run")
    assert asked
    with pytest.raises(RequestError, match="environment"):
        snippets.run("functions", tmp_path / "refused", tasks={"functions": rollart.Task(tools=[capital])}, steps=1)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name: str, tmp_path: Path) -> None:
    """Mean reward of the last quarter above that of the first by two standard errors."""
    needs(name)
    snippets.run(name, steps=60, out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    means = [line["rewards"][name] for line in lines if name in line.get("rewards", {})]
    first, last = means[:15], means[-15:]
    error = math.sqrt(sum(_variance(part) / len(part) for part in (first, last)))
    start = _mean(means[:5])
    print(f"{name}: {start:.3f} at the start, {_mean(first):.3f} ± {error:.3f} → {_mean(last):.3f}")  # noqa: T201
    assert start > 0
    assert _mean(last) > _mean(first) + 2 * error


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: list[float]) -> float:
    return math.fsum((value - _mean(values)) ** 2 for value in values) / (len(values) - 1)
