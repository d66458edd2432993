"""`rollart model`: pretrained models as folders that runs start from."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from rollart.app.model_import import QUESTION, import_model
from rollart.app.running import RuntimeKind, require, say

app = typer.Typer(no_args_is_help=True, help="Pretrained models as folders that runs start from.")


@app.callback()
def models() -> None:
    """Pretrained models as folders that runs start from."""


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="A GGUF file, the folder of one, or a Hugging Face folder.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Precision of the weights.")] = "float32",
    json: Annotated[bool, typer.Option("--json", help="Print only one JSON object on stdout.")] = False,
) -> None:
    """Write a model folder for `model = "…"`, with tokenizer and chat template, and check it. Nothing is downloaded.

    Example: rollart model import SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2
    """
    require(RuntimeKind.INLINE)
    imported = import_model(source, out, dtype, say)
    if json:
        sys.stdout.write(msgspec.json.encode(imported, enc_hook=str).decode() + "\n")
        return
    say(f"{imported.architecture}, {imported.parameters / 1e6:.1f} M parameters, {imported.vocabulary:,} tokens")
    say(f"asked {QUESTION!r}, it says: {imported.continuation!r}")
    say(f"model: {imported.folder}")
