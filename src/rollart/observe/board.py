"""Metrics in TensorBoard's record format; needs tensorboardX.

The writer of tensorboardX has a thread that dies when the disk is full, after which every write hangs. Here a record is
written synchronously, and a failure is raised.
"""

import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar

from rollart.observe.files import append_whole


class Board:
    """One event file per start of a run; TensorBoard reads those of a folder as one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time_ns()}"
        append_whole(self._path, _record(Event(wall_time=time.time(), file_version="brain.Event:2")))

    def restart(self, step: int) -> None:
        """Void the records of this step and later ones."""
        append_whole(
            self._path,
            _record(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))),
        )

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        now = time.time()
        summaries = (scalar(name, value) for name, value in scalars.items())
        append_whole(
            self._path, b"".join(_record(Event(wall_time=now, step=step, summary=summary)) for summary in summaries)
        )


def _record(event: Any) -> bytes:
    data: bytes = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
