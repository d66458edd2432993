"""A worker that opens what travelled, prints, saves checkpoints and dies, on request of a `ScoreRequest`'s key."""

import ctypes
import json
import os
import signal
import tempfile
from pathlib import Path

from nodes import wait_until

from rollart.backends.trainers.checkpoint import CheckpointPlace
from rollart.backends.trainers.remote_checkpoints import RemoteCheckpoints
from rollart.distributed.ray_files import RayFiles
from rollart.ports.worker import Advance
from rollart.types.messages import Observed, RewardInfo
from rollart.types.tokens import EMPTY
from rollart.types.versions import Version

BIG = 20 << 20
"""Bytes of a checkpoint: several pieces."""


class DiesHalfway(RayFiles):
    """Sends a few pieces; then the process is killed."""

    def _writes(self, source, entries, draft):
        for number, write in enumerate(super()._writes(source, entries, draft)):
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield write


class CutHalfway(RayFiles):
    """Sends a few pieces, and the others when its node's link is cut."""

    def _writes(self, source, entries, draft):
        for number, write in enumerate(super()._writes(source, entries, draft)):
            if number == 2:
                temporary = Path(tempfile.gettempdir())
                (temporary / "halfway").touch()
                wait_until((temporary / "cut").exists)
            yield write


class Traveller:
    def __init__(self, settings, wake):  # noqa: ARG002 - it never wakes the runtime
        self.settings = settings
        self.commands = []
        self.checkpoints = None
        self.restored = None
        if "checkpoints" in settings:
            self.checkpoints = RemoteCheckpoints(settings["checkpoints"], keep=2)
            newest = self.checkpoints.newest()
            self.restored = None if newest is None else str(newest.version)

    def info(self):
        return RewardInfo(slots=1)

    def post(self, commands):
        self.commands += commands

    def advance(self, now):  # noqa: ARG002 - nothing is timed
        commands, self.commands = self.commands, []
        return Advance([self.answer(command) for command in commands], None)

    def answer(self, command):
        value = command.episodes[0].transcript.decode()
        found = getattr(self, command.key)(value)
        return Observed(command.episodes[0].trajectory, 0, EMPTY, transcript=json.dumps(found).encode())

    def close(self):
        print("closing", flush=True)  # noqa: T201 - a worker's output
        if self.checkpoints is not None:
            self.checkpoints.close()

    # --- on request

    def open(self, _):
        folders = [self.settings["model"], self.settings["codec_settings"]["folder"]]
        size = sum(path.stat().st_size for path in Path(folders[0]).iterdir())
        return {"folders": folders, "bytes": size, "temporary": sorted(os.listdir(tempfile.gettempdir()))}

    def say(self, line):
        print(line, flush=True)  # noqa: T201 - a worker's output

    def crash(self, line):
        print(line, flush=True)  # noqa: T201 - a worker's output
        ctypes.string_at(0)

    def save(self, version):
        epoch, step = map(int, version.split("."))
        self.checkpoints.save(Version(epoch, step), self.files(), {"at": version})
        return self.restored

    def die(self, version):
        self.save_through(DiesHalfway, version)

    def be_cut(self, version):
        self.save_through(CutHalfway, version)

    def save_through(self, kind, version):
        place = self.settings["checkpoints"]
        files = kind(place.files._home, place.files._place)
        self.checkpoints.close()
        self.checkpoints = RemoteCheckpoints(CheckpointPlace(files, place.run))
        self.save(version)

    def files(self):
        return [("config.json", b"{}"), ("model.safetensors", os.urandom(BIG))]
