"""A tiny checkpoint with a tokenizer and a chat template, and `rollart serve` on it in a process of its own."""

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from real_cli import COMMAND
from tiny_work import MODEL_CONFIG
from worker_settings import worker_settings

from rollart.backends.engines.torch_engine import TorchEngine
from rollart.backends.models import build_model
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.trainers.training_state import write_model
from rollart.tasks.tokenizer import build_tokenizer, tokenizer_files
from rollart.types.messages import Add, Sampling, TurnDone
from rollart.types.tokens import Segment

KEY = "a-key-for-tests"
PATIENCE_S = 100.0
CONTEXT = 512
READY = re.compile(r"serving (\S+) at http://127\.0\.0\.1:(\d+)/v1")


def tiny_checkpoint(folder: Path, *, endless: bool = False, **config: object) -> Path:
    """Random weights, far from uniform, over bytes and a few words; `config` changes the model's.

    `endless`: no token ends an answer.
    """
    tokenizer = build_tokenizer(["what is left of the tree", "a bird sits there and sings"])
    size = {"vocab_size": tokenizer.get_vocab_size(), "initializer_range": 0.3}
    setting = {"config": {**MODEL_CONFIG, **size, **config}}
    write_model(folder, setting, build_model(setting, dtype="float32", device="cpu", seed=1))
    for name, data in tokenizer_files(tokenizer).items():
        (folder / name).write_bytes(data)
    if endless:
        about = {"chat_template": "{% for message in messages %}{{ message.content }} {% endfor %}"}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def direct(folder: Path, prompts: Sequence[Sequence[int]], **sampling: object) -> list[TurnDone]:
    """What the engine samples for these prompts, one after the other, without any server."""
    settings = {"model": str(folder), "store": MemoryStore(), "serve_folder_as": (0, 0), "max_context": CONTEXT}
    engine = TorchEngine(worker_settings(TorchEngine, settings), lambda: None)
    out = []
    for number, prompt in enumerate(prompts, start=1):
        engine.post([Add(number, number, "t", 0, b"", Segment.of(list(prompt)), Sampling(**sampling))])
        ended: list[TurnDone] = []
        while not ended:
            ended = [each for each in engine.advance(0.0).events if isinstance(each, TurnDone)]
        out += ended
    engine.close()
    return out


class Process:
    """`rollart serve`; its standard error is read by a thread."""

    def __init__(self, *words: str | Path, cwd: Path, key: str = KEY) -> None:
        env = {**os.environ, "ROLLART_API_KEY": key, "PYTHONUNBUFFERED": "1"}
        command = [*COMMAND, "serve", *map(str, words), "--port", "0"]
        self.process = subprocess.Popen(command, cwd=cwd, env=env, stderr=subprocess.PIPE, text=True)
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        ready = self.wait_for(READY)
        self.name, self.port = ready[1], int(ready[2])
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def said(self) -> str:
        with self._changed:
            return "".join(self._lines)

    def wait_for(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Wait until standard error has a line like this."""

        def found() -> re.Match[str] | None:
            return next(filter(None, map(pattern.search, self._lines)), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() or self._ended, PATIENCE_S), self._lines
            match = found()
            assert match, "".join(self._lines)
            return match

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def stop(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.ends()
            finally:
                self.process.kill()


@contextmanager
def serving(*words: str | Path, cwd: Path, key: str = KEY) -> Iterator[Process]:
    process = Process(*words, cwd=cwd, key=key)
    try:
        yield process
    finally:
        process.stop()
