"""`rollart doctor` says what isolates sandboxes here, or what is missing."""

import pytest
from typer.testing import CliRunner

from rollart.backends.sandboxes import connection
from rollart.cli.main import app


def test_the_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.shutil, "which", lambda _: None)
    result = CliRunner().invoke(app, ["doctor"])
    (line,) = [line for line in result.output.splitlines() if "sandboxes" in line]
    assert "note" in line
    assert "apt-get install bubblewrap" in line
