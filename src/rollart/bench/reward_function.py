"""The reward function of `rollart bench reward`: takes as long as its prompt says, and returns how long that was."""

import time

from rollart.types.transcript import Transcript


def work(t: Transcript) -> float:
    """Wait, as a function does that asks another service; the reward is the seconds of its work."""
    began = time.monotonic()
    time.sleep(t.prompt["work_s"])
    return time.monotonic() - began
