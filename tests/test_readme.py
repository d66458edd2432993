"""The example on the first page runs as it is printed, and learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.timeout(300)
def test_the_example_runs_and_learns(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"HeldOut\(before=([\d.]+), after=([\d.]+)\) (runs/run-1/checkpoints/\S+)\n", done.stdout)
    assert found, done.stdout
    before, after = float(found[1]), float(found[2])
    assert (tmp_path / found[3] / "model.safetensors").is_file()
    assert before < 0.2
    assert after > 0.5
    texts = sorted((tmp_path / "runs" / "run-1" / "trajectories").glob("*.txt"))
    assert "Say " in texts[0].read_text()
