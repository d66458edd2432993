"""Write the signature of `rollart.Task` from the settings that a config has: `make task-signature`.

Editors and type checkers read signatures, so these are text in a file. `tests/app/test_task.py` fails where the file
differs from what this writes.
"""

import ast
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT / "src" / "rollart" / "config" / "tasks.py"
TASK = ROOT / "src" / "rollart" / "app" / "task.py"
BEGIN, END = "    # --- written by tools/task_signature.py\n", "    # --- end\n"
WIDTH = 116

POSITIONAL = ("environment", "reward")
OWN_TYPES = {
    "environment": "Callable[..., Any] | str | None",
    "reward": "RewardFunction | str | None",
    "rewards": "Sequence[RewardFunction | Mapping[str, Any] | str]",
    "prompts": "PromptData",
    "eval_prompts": "PromptData",
    "tools": "Tools",
    "prompt": "str | Sequence[Mapping[str, str]]",
    "stale": 'StaleTreatment | Literal["abort", "mask"]',
    "inject": "Mapping[str, Any] | Sequence[Mapping[str, Any]]",
}
"""Where Python takes more than a config."""
OWN_TEXTS = {
    "environment": "Class with Gymnasium's interface on text, or a `rollart.TextEnvironment`; a factory of one; or its "
    "path. Without one, the rows of `prompts` are answered in a single turn, or with `tools`.",
    "reward": "Function of a `rollart.Transcript`, or of a list of them for a whole group; by default the sum of the "
    "environment's rewards.",
    "rewards": 'Several rewards: functions, or tables such as `{"function": judged, "weight": 0.2}`.',
    "prompts": "Training prompts: rows (dicts, a Hugging Face dataset, any iterable, which is read once), the path of "
    "a JSON-lines or Parquet file or of a folder, or a range of seeds.",
    "tools": "Python functions, classes whose methods are tools with state per episode, and `rollart.mcp(…)`.",
}
PLAIN = {
    "Positive": "int",
    "NotNegative": "int",
    "PositiveReal": "float",
    "NotNegativeReal": "float",
    "Seconds": "float",
}


class Setting(NamedTuple):
    name: str
    kind: str
    about: str


def settings() -> list[Setting]:
    """The fields of `TaskSettings`, in order, with what their docstrings say."""
    module = ast.parse(SCHEMA.read_text(encoding="utf-8"))
    task = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "TaskSettings")
    found = []
    for node, after in zip(task.body, [*task.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            about = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                about = " ".join(str(after.value.value).split())
            kind = OWN_TYPES.get(name) or _kind(ast.unparse(node.annotation))
            found.append(Setting(name, kind, OWN_TEXTS.get(name) or about or _words(name)))
    return found


def _kind(annotation: str) -> str:
    """The type that a caller writes."""
    annotation = re.sub(r"Annotated\[(\w+), .*\)\]", r"\1", annotation).replace("'", '"')
    annotation = re.sub(r"tuple\[(\w+), \.\.\.\]", r"Sequence[\1]", annotation).replace("dict[", "Mapping[")
    return re.sub(r"\w+", lambda word: PLAIN.get(word[0], word[0]), annotation)


def _words(name: str) -> str:
    unit = {"s": " in seconds"}
    *words, last = name.split("_")
    text = " ".join([*words, *([] if last in unit else [last])]) + unit.get(last, "")
    return f"{text[:1].upper()}{text[1:]}."


def written() -> str:
    """The constructor."""
    found = {setting.name: setting for setting in settings()}
    keywords = [setting for name, setting in found.items() if name not in POSITIONAL]
    lines = [BEGIN, "    def __init__(\n", "        self,\n"]
    lines += [f"        {name}: {found[name].kind} = UNSET,\n" for name in POSITIONAL]
    lines += ["        *,\n"]
    lines += [f"        {setting.name}: {setting.kind} = UNSET,\n" for setting in keywords]
    lines += [
        "        **unknown: Never,\n",
        "    ) -> None:\n",
        '        """Check the settings of a task.\n\n',
        "        Args:\n",
    ]
    for setting in (*(found[name] for name in POSITIONAL), *keywords):
        text = textwrap.wrap(f"{setting.name}: {setting.about}", WIDTH - 12, subsequent_indent="    ")
        lines += [f"            {line}\n" for line in text]
    lines += ['        """\n', "        given = locals()\n"]
    lines += ["        self._take({name: given[name] for name in TaskSettings.model_fields} | unknown)\n", "\n", END]
    return "".join(lines)


def main() -> int:
    text = TASK.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    wanted = head + written() + tail
    if "--check" in sys.argv:
        return int(wanted != text)
    TASK.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
