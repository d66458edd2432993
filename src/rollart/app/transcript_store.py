"""The transcripts of a run, in its folder: the newest ones, up to a size.

    <run>/transcripts/000001.bin, 000002.bin, …     records, each its length (4 bytes) and a `StoredTranscript`

Invariants: all files together are never larger than the limit; the oldest file is removed when a new one needs room. A
record is written whole or not at all, and a reader ignores one that a crash cut off. Nothing in a run depends on them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from rollart.app.redaction import KEEP_ALL, Redactor
from rollart.observe.files import append_whole
from rollart.types.errors import RequestError
from rollart.types.ids import GroupId, TrajectoryId
from rollart.types.trajectory import Outcome, Purpose, Trajectory
from rollart.types.transcript import Transcript, unpack

FILES = 8
"""Number of files that the limit is divided into: an eighth of the transcripts is removed at a time."""
_LENGTH_BYTES = 4


class StoredTranscript(msgspec.Struct, frozen=True):
    """A transcript and what became of its trajectory."""

    trajectory: TrajectoryId
    group: GroupId
    task: str
    purpose: Purpose
    outcome: Outcome
    packed: bytes
    """The transcript (`types.transcript.pack`)."""
    step: int | None = None
    """Step of the weights that its first token was sampled with."""
    reward: float | None = None
    rewards: dict[str, float] = {}
    """By name, if the task has several."""

    def transcript(self) -> Transcript:
        return unpack(self.packed)


class TranscriptStore:
    """Appends transcripts of ended trajectories."""

    def __init__(
        self, folder: Path, limit_bytes: int, say: Callable[[str], None], redactor: Redactor = KEEP_ALL
    ) -> None:
        self._redactor = redactor
        self._folder = folder
        self._limit = limit_bytes
        self._say = say
        self._files: deque[tuple[Path, int]] = deque()
        """Files with their sizes, the oldest first."""
        self._number = 0
        self._lost = not limit_bytes
        try:
            for path in _files(folder):
                self._files.append((path, path.stat().st_size))
                self._number = int(path.stem)
        except OSError as error:
            self._give_up(error)
        self._size = sum(size for _, size in self._files)
        # A crash may have cut off the last record of a file, so that file is not appended to.
        self._current = 0

    def ended(self, trajectory: Trajectory) -> None:
        """Keep the transcript of an ended trajectory, if it has one."""
        if self._lost or not trajectory.transcript:
            return
        packed = self._redactor.packed(trajectory.transcript)
        if not packed:
            return
        body = msgspec.msgpack.encode(_stored(trajectory, packed))
        record = len(body).to_bytes(_LENGTH_BYTES, "little") + body
        try:
            self._write(record)
        except OSError as error:
            self._give_up(error)

    def _write(self, record: bytes) -> None:
        if len(record) > self._limit:
            return
        if not self._current or self._current + len(record) > self._limit // FILES:
            self._number += 1
            self._current = 0
            self._folder.mkdir(exist_ok=True)
            self._files.append((self._folder / f"{self._number:06}.bin", 0))
        while self._size + len(record) > self._limit:
            path, size = self._files.popleft()
            path.unlink(missing_ok=True)
            self._size -= size
        path, size = self._files[-1]
        append_whole(path, record)
        self._files[-1] = (path, size + len(record))
        self._current += len(record)
        self._size += len(record)

    def _give_up(self, error: OSError) -> None:
        self._lost = True
        self._say(f"{self._folder}: cannot write transcripts, stopping: {error}")


def read_transcripts(folder: Path) -> Iterator[StoredTranscript]:
    """The stored transcripts of a run, in the order in which their trajectories ended."""
    decoder = msgspec.msgpack.Decoder(StoredTranscript)
    for path in _files(folder):
        try:
            opened = path.open("rb")
        except FileNotFoundError:  # a run that still writes has removed it
            continue
        with opened as file:
            while len(head := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
                length = int.from_bytes(head, "little")
                body = file.read(length)
                if len(body) < length:
                    break
                try:
                    yield decoder.decode(body)
                except msgspec.MsgspecError as error:
                    raise RequestError(f"{path} is damaged ({error}); remove it to read the others") from error


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.bin") if path.stem.isdecimal())


def _stored(trajectory: Trajectory, packed: bytes) -> StoredTranscript:
    first, sheet = trajectory.first_version, trajectory.rewards
    return StoredTranscript(
        trajectory=trajectory.id,
        group=trajectory.group,
        task=trajectory.task,
        purpose=trajectory.purpose,
        outcome=trajectory.outcome or Outcome.CANCELLED,
        packed=packed,
        step=None if first is None else first.step,
        reward=trajectory.reward,
        rewards={} if sheet is None else dict(sheet.values),
    )
