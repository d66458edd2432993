"""The test's side of `runtime_driver.py`."""

import json
import queue
import subprocess
import threading
import time

from rollart.types.placement import ACCELERATOR


class Controller:
    """Context manager: a driver on a node of the cluster, the head unless another is given."""

    def __init__(self, cluster, node=None):
        self._cluster, self._node = cluster, node
        self._news = queue.Queue()
        self.heard = []

    def __enter__(self):
        self._process = self._cluster.driver(
            "runtime_driver.py", self._cluster.address, node=self._node, stdin=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        threading.Thread(target=self._read, daemon=True).start()
        self.until("connected")
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            self.tell(end=True)
        self._process.wait(timeout=100)

    def _read(self):
        for line in self._process.stdout:
            self._news.put(json.loads(line) if line.startswith("{") else {"output": line})
        self._news.put({"ended": True})

    def tell(self, **command):
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def until(self, kind, seconds=100.0):
        """The next news of a kind; earlier ones of other kinds are in `heard`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                news = self._news.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise AssertionError(f"no {kind} within {seconds:g} s; heard {self.heard}") from None
            self.heard.append(news)
            if kind in news:
                return news
            assert "ended" not in news, f"the driver ended; heard {self.heard}"
            assert "died" not in news or kind != "joined", f"it died instead: {news}"

    def spawn(self, worker, *kinds):
        """Start a worker on a node of the first kind, or of another; returns where it was placed once it has joined."""
        labels, *others = [{ACCELERATOR: kind} for kind in kinds]
        self.tell(spawn=worker, labels=labels, fallback=others)
        placed = self.until("placed")
        assert self.until("joined")["joined"] == worker
        return placed

    def report(self):
        """By living worker: the number of messages sent, and whether each came back once and in order."""
        self.tell(report=True)
        return self.until("report")["report"]

    def deaths(self):
        return [news["died"] for news in self.heard if "died" in news]
