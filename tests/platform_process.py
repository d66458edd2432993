"""`rollart reward platform` in a process of its own."""

import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from real_cli import COMMAND

PATIENCE_S = 400.0
READY = re.compile(r"serving \S+ at (http://127\.0\.0\.1:\d+)")


class PlatformProcess:
    """A platform that serves a function at `url`."""

    def __init__(self, function: str, cwd: Path, secret: str, *options: str) -> None:
        command = [*COMMAND, "reward", "platform", function, "--port=0", "--secret-env=MY_SECRET", *options]
        self.process = subprocess.Popen(
            command, cwd=cwd, env=os.environ | {"MY_SECRET": secret}, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:
            said += line
            found = READY.search(line)
            if found:
                self.url = found[1]
                break
        else:
            raise AssertionError(said)
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/health", timeout=PATIENCE_S) as response:
            report: dict[str, Any] = json.loads(response.read())
        return report

    def wait_until_idle(self) -> dict[str, Any]:
        """Its report once it has no replica."""
        wait_for(lambda: self.health()["replicas"] == 0)
        return self.health()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@contextmanager
def running_platform(function: str, cwd: Path, secret: str, *options: str) -> Iterator[PlatformProcess]:
    """A platform that ends in order after the test."""
    platform = PlatformProcess(function, cwd, secret, *options)
    try:
        yield platform
    finally:
        platform.process.send_signal(signal.SIGTERM)
        assert platform.process.wait(PATIENCE_S) == 0
