"""`rollart serve`: an OpenAI-compatible endpoint for a trained model."""

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from rollart.app.serving.settings import ServeSettings
from rollart.types.errors import RequestError

DEFAULTS = ServeSettings()


def serve(
    checkpoint: Annotated[Path, typer.Argument(help="A run, one of its checkpoints, a checkpoint or adapter folder.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = DEFAULTS.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any that is free.")] = DEFAULTS.port,
    name: Annotated[str, typer.Option(help="Name of the model for clients; by default the folder's.")] = "",
    base: Annotated[Path | None, typer.Option(help="Base model of an adapter, if not the folder it names.")] = None,
    slots: Annotated[int, typer.Option(help="Answers generated at once.")] = DEFAULTS.slots,
    queue: Annotated[int, typer.Option(help="Answers that may wait; more get status 429.")] = DEFAULTS.queue,
    max_context: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer; by default the model's limit, at most 8192.")
    ] = DEFAULTS.max_context,
    kv_mib: Annotated[float, typer.Option(help="Memory for the KV of all answers.")] = DEFAULTS.kv_mib,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = DEFAULTS.dtype,
    device: Annotated[str, typer.Option(help="Device of the engine, such as cuda:0.")] = DEFAULTS.device,
    grace_s: Annotated[int, typer.Option(help="Seconds for answers to finish after SIGTERM.")] = DEFAULTS.grace_s,
) -> None:
    """Serve a model with an OpenAI-compatible API, until Ctrl-C or SIGTERM.

    Clients need the key in ROLLART_API_KEY; without one, a key is generated and shown.

    Example: rollart serve runs/frozenlake-1 --port 8000
    """
    missing = [each for each in ("torch", "uvicorn", "starlette") if importlib.util.find_spec(each) is None]
    if missing:
        raise RequestError(f"serving needs {', '.join(missing)}; install them with: pip install 'rollart[serve]'")
    settings = _checked(
        host=host,
        port=port,
        slots=slots,
        queue=queue,
        max_context=max_context,
        kv_mib=kv_mib,
        dtype=dtype,
        device=device,
        grace_s=grace_s,
    )
    from rollart.app.serving.server import serve as run  # late: other commands need no server

    run(checkpoint, settings, base=base, name=name)


def _checked(**options: Any) -> ServeSettings:
    try:
        return ServeSettings(**options)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise RequestError(f"--{option} {first['input']}: {first['msg'].lower()}") from error
