"""A trial cluster of the real command."""

import shutil
import tempfile
from pathlib import Path

from real_cli import rollart


class Trial:
    """A trial cluster with a temporary folder of its own, so that it is the only one there."""

    def __init__(self, nodes: str, *options: str) -> None:
        # Short, because Ray puts sockets there, whose paths are limited in length.
        self.tmp = tempfile.mkdtemp(prefix="rc-")
        done = self.call("cluster", "up", "--nodes", nodes, *options, cwd=Path(self.tmp))
        assert done.code == 0, done.err

    def call(self, *words: str | Path, cwd: Path):
        return rollart(*words, cwd=cwd, TMPDIR=self.tmp)

    def close(self) -> None:
        done = self.call("cluster", "down", cwd=Path(self.tmp))
        left = [path.name for path in Path(self.tmp).iterdir() if path.name.startswith("rollart-cluster")]
        shutil.rmtree(self.tmp)
        assert (done.code, left) == (0, [])
