"""Interpreters with packages of the field, which `make venv-fields` creates; tests without them are skipped."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def field_python(name: str) -> str:
    """The interpreter of `.venv-NAME`."""
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python.relative_to(ROOT)}: make venv-fields")
    return str(python)
