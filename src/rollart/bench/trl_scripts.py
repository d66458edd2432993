"""The dataset and reward of `rollart bench trl`: its rows, and the scripts that a user would write for either side."""

import ast
import io
import json
import os
import random
import subprocess
import sys
import tokenize
from importlib import resources
from pathlib import Path

from rollart.bench.trl import Played, ScriptOrder, Steps
from rollart.bench.trl_played import played_in
from rollart.config.injection import Injection
from rollart.tasks.arithmetic import Arithmetic, with_calculator
from rollart.tasks.prompts import SeedPrompts
from rollart.types.chat import readable
from rollart.types.errors import RunError

ROWS = 512
SCRIPTS = {"rollart": "with_rollart.py", "trl": "with_trl.py"}
_BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def write_rows(file: Path) -> Path:
    """Problems of the quickstart's arithmetic as chat messages, each with the first call of the calculator."""
    source, environment, chance = SeedPrompts("math", 0, 100_000, held_out=False), Arithmetic(), random.Random(0)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(ROWS):
            asked = readable(environment.reset(source.next()).observation)
            row = {"prompt": [{"role": "user", "content": asked}], "answer": with_calculator([asked], chance)}
            out.write(json.dumps(row) + "\n")
    return file


def script(side: str) -> str:
    """Source of a side's script."""
    return resources.files("rollart.bench.snippets").joinpath(SCRIPTS[side]).read_text(encoding="utf-8")


def count_lines() -> dict[str, int]:
    """Lines of code of both scripts."""
    return {side: lines_of_code(script(side)) for side in SCRIPTS}


def lines_of_code(source: str) -> int:
    """Lines that are neither blank nor comment nor docstring.

    >>> lines_of_code("'What it does,'\\n\\nx = [  # some\\n    1,\\n]\\n# more\\nprint(x)")
    4
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _BLANK:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def run_script(model: str, rows: Path, steps: Steps, folder: Path) -> Played:
    """Run the script of rollart as a user does."""
    total = str(steps.warm_up + steps.counted)
    with resources.as_file(resources.files("rollart.bench.snippets").joinpath(SCRIPTS["rollart"])) as file:
        command = [sys.executable, str(file), model, str(rows), total, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{file.name} failed: {done.stderr.strip()[-500:]}")
    return played_in(folder, steps.warm_up, Injection())


def script_order(model: str, rows: Path, steps: Steps) -> ScriptOrder:
    """The same for TRL."""
    return ScriptOrder(
        model=model,
        rows=str(rows),
        steps=steps.warm_up + steps.counted,
        warm_up=steps.warm_up,
        threads=os.cpu_count() or 1,
    )
