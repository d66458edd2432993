"""A reward function that does what the agent said. Light: processes that import it start fast."""

import ctypes
import os
import subprocess
import threading
import time
from pathlib import Path

from rollart.types.messages import EpisodeRecord, ScoreRequest
from rollart.types.transcript import Transcript, TranscriptTurn, pack

OBEY = f"{__name__}:obey"


def obey(t: Transcript) -> float:
    """Does what the agent said; the value is the process that did it."""
    match t.final_text.split():
        case ["hold", "the", "lock"]:
            ctypes.PyDLL(None).sleep(600)
        case ["say", "and", "hang"]:
            print("hanging", flush=True)  # noqa: T201
            time.sleep(600)
        case ["hang"]:
            time.sleep(600)
        case ["leave", path]:
            Path(path).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
            time.sleep(600)
        case ["crash"]:
            ctypes.string_at(0)
        case ["exit"]:
            os._exit(3)
        case ["length", text]:
            return float(len(text))
    return float(os.getpid())


def raising_body(function):  # noqa: ARG001
    """A body that raises, and whose thread outlives it."""
    threading.Thread(target=threading.Event().wait).start()

    def answer(request):
        raise RuntimeError(request)

    return answer


def question(number, text, deadline_s=100.0):
    t = Transcript(task="t", trajectory=number, prompt_id="p", seed=0, member=0, turns=(TranscriptTurn("?", text),))
    return ScoreRequest(f"{number}", "t", "obey", (EpisodeRecord(number, 0, transcript=pack(t)),), deadline_s)
