"""The environment of the conformance suite for an interpreter of its own, without any package."""

from pathlib import Path

from rollart import Prompt, TextStep


class Counter:
    """Takes four steps, counting up from the prompt's seed; fails in `fail`, if given. Prints, as libraries do."""

    def __init__(self, count: str, fail: str = "") -> None:
        self._count = count
        self._fail = fail
        self._number = 0
        self._left = 4

    def reset(self, prompt: Prompt) -> TextStep:
        self._executed("reset")
        if self._fail == "reset":
            raise RuntimeError("no container left")
        self._number = prompt.seed
        return TextStep(f"count from {self._number}")

    def step(self, action: str) -> TextStep:
        self._executed("step")
        if self._fail == "step":
            raise RuntimeError("the container is gone")
        self._number += len(action)
        self._left -= 1
        return TextStep(str(self._number), reward=0.25, done=self._left == 0, artifact=b"end")

    def close(self) -> None:
        print("closed")  # noqa: T201 - noise

    def _executed(self, what: str) -> None:
        print(what)  # noqa: T201 - noise
        with Path(self._count).open("a") as file:
            file.write("x")
