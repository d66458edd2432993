"""Files of a run between its nodes: an actor beside the controller that other nodes read from and write to.

    worker, any node                                     controller's node
    RayFiles.put ──(pieces of 8 MB, 4 in flight)──► FilesActor ──► <run folder>/checkpoints/
    RayFiles.get ◄─────────────────────────────────────┤ ◄── checkpoints, and folders that travel (models)
    LogForwarder (`remote_logs`) ──(appended lines)────┴──► <run folder>/logs/

Invariants: the actor writes below the folders of checkpoints and logs only, and reads from there and from the folders
named at its start. It ends with the controller. A call that failed because of the network is repeated for up to
`GIVE_UP_S`; all calls can be repeated.
"""

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollart.distributed.folder_files import FolderFiles, NamedFolders
from rollart.distributed.log_files import LogFiles
from rollart.ports.folder_transfer import PIECE_BYTES, check_name, entries_of, pieces, receive
from rollart.types.digests import bulk_digest
from rollart.types.errors import FilesError
from rollart.types.files import Entries, FileEntry, folder_digest

IN_FLIGHT = 4
"""Pieces of one transfer that are under way."""
CALL_S = 60.0
GIVE_UP_S = 180.0
AGAIN_S = 0.5
CHECKPOINTS = "checkpoints"
FOLDERS = "folders"
"""Place of folders of the controller's machine, for reading only, each under its digest."""
LOG_GROUP = "logs"
"""Concurrency group of one thread, so that lines of a log do not wait for a checkpoint."""


class Home(msgspec.Struct, frozen=True):
    """How a process of the run reaches the controller's files."""

    node: str
    """Id of the controller's node: processes there open the run folder themselves."""
    actor: str
    namespace: str

    def is_here(self) -> bool:
        """Whether this process runs on the controller's node."""
        here: str = ray.get_runtime_context().get_node_id()
        return here == self.node

    def handle(self) -> Any:
        return ray.get_actor(self.actor, namespace=self.namespace)


class FilesActor:
    """The controller's end. Every call is short, but for those that hash a whole folder."""

    def __init__(self, checkpoints: str, logs: str, folders: Mapping[str, tuple[str, Entries]]) -> None:
        self._checkpoints = FolderFiles(Path(checkpoints))
        self._folders = NamedFolders({name: (Path(path), entries) for name, (path, entries) in folders.items()})
        self._logs = LogFiles(Path(logs))

    def folders(self, place: str) -> list[str]:
        return self._place(place).folders()

    def contents(self, place: str, folder: str) -> Entries:
        return self._place(place).contents(folder)

    def read(self, place: str, folder: str, name: str, offset: int) -> tuple[bytes, str]:
        return self._place(place).read(folder, name, offset)

    def begin(self, place: str, folder: str) -> str:
        return self._writable(place).begin(folder)

    def write(self, place: str, draft: str, name: str, offset: int, piece: bytes, digest: str) -> None:
        self._writable(place).write(draft, name, offset, piece, digest)

    def commit(self, place: str, draft: str, folder: str, entries: Entries) -> None:
        self._writable(place).commit(draft, folder, entries)

    def abandon(self, place: str, draft: str) -> None:
        self._writable(place).abandon(draft)

    def delete(self, place: str, folder: str) -> None:
        self._writable(place).delete(folder)

    def discard_drafts(self, place: str) -> None:
        self._writable(place).discard_drafts()

    @ray.method(concurrency_group=LOG_GROUP)  # type: ignore[untyped-decorator]
    def append_log(self, name: str, offset: int, lines: bytes) -> int:
        return self._logs.append(name, offset, lines)

    def _place(self, place: str) -> FolderFiles | NamedFolders:
        return self._folders if place == FOLDERS else self._checkpoints

    def _writable(self, place: str) -> FolderFiles:
        if place != CHECKPOINTS:
            raise FilesError(f"{place} is for reading only")
        return self._checkpoints


class ControllerFiles:
    """Serves the files of this run to its other nodes. Make it while connected to Ray; it ends with the connection."""

    def __init__(self, run_folder: Path, *, checkpoints: Path, logs: Path, folders: Sequence[Path] = ()) -> None:
        """`folders` are those of this machine that workers open, such as the initial model."""
        for path in (checkpoints, logs):
            if not path.absolute().is_relative_to(run_folder.absolute()):
                raise FilesError(f"{path} is not below the run folder {run_folder}")
        context = ray.get_runtime_context()
        self.home = Home(context.get_node_id(), f"rollart-files-{secrets.token_hex(8)}", context.namespace)
        entries = {str(path): entries_of(path) for path in folders}
        self.travelling = {path: folder_digest(files) for path, files in entries.items()}
        """Digest of each folder, by its path as it stands in settings."""
        FolderFiles(checkpoints).discard_drafts()  # of a session that was killed
        served = {self.travelling[path]: (os.path.abspath(path), files) for path, files in entries.items()}
        self._actor = _ACTOR.options(
            name=self.home.actor,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.home.node, soft=False),
        ).remote(str(checkpoints.absolute()), str(logs.absolute()), served)

    @property
    def checkpoints(self) -> "RayFiles":
        """The run's checkpoints, for a trainer on any node."""
        return RayFiles(self.home, CHECKPOINTS)

    @property
    def folders(self) -> "RayFiles":
        """Folders that travel, each under its digest."""
        return RayFiles(self.home, FOLDERS)

    def close(self) -> None:
        ray.kill(self._actor)


class RayFiles:
    """`RunFiles` of the controller's machine, from any node."""

    def __init__(self, home: Home, place: str) -> None:
        self._home = home
        self._place = place

    def folders(self) -> list[str]:
        found: list[str] = self._call("folders")
        return found

    def contents(self, folder: str) -> Entries:
        found: Entries = self._call("contents", check_name(folder))
        return found

    def put(self, source: Path, folder: str) -> None:
        entries = entries_of(source)
        draft: str = self._call("begin", check_name(folder))
        try:
            for _ in self._in_flight("write", self._writes(source, entries, draft)):
                pass
            self._call("commit", draft, folder, entries)
        except FilesError:
            self._call("abandon", draft, give_up_s=0.0)
            raise

    def get(self, folder: str, target: Path) -> None:
        receive(target, self.contents(folder), lambda entry: self._read(folder, entry))

    def delete(self, folder: str) -> None:
        self._call("delete", check_name(folder))

    def discard_drafts(self) -> None:
        self._call("discard_drafts")

    def _writes(self, source: Path, entries: Entries, draft: str) -> Iterator[tuple[Any, ...]]:
        for entry in entries:
            offset = 0
            for piece in pieces(source / entry.name):
                yield draft, entry.name, offset, piece, bulk_digest(piece)
                offset += len(piece)

    def _read(self, folder: str, entry: FileEntry) -> Iterator[bytes]:
        orders = ((folder, entry.name, offset) for offset in range(0, entry.nbytes, PIECE_BYTES))
        for piece, digest in self._in_flight("read", orders):
            if bulk_digest(piece) != digest:
                raise FilesError(f"a piece of {entry.name} arrived damaged; fetch it again")
            yield piece

    def _in_flight(self, method: str, orders: Iterator[tuple[Any, ...]]) -> Iterator[Any]:
        """Results of these calls, in order, a few of which are under way at a time."""
        under_way: deque[tuple[tuple[Any, ...], Any]] = deque()
        actor = self._actor()
        for order in orders:
            under_way.append((order, getattr(actor, method).remote(self._place, *order)))
            if len(under_way) >= IN_FLIGHT:
                yield self._result(method, *under_way.popleft())
        while under_way:
            yield self._result(method, *under_way.popleft())

    def _result(self, method: str, order: tuple[Any, ...], started: Any) -> Any:
        return repeated(lambda first: started if first else self._start(method, order))

    def _call(self, method: str, *order: Any, give_up_s: float = GIVE_UP_S) -> Any:
        return repeated(lambda _: self._start(method, order), give_up_s)

    def _start(self, method: str, order: tuple[Any, ...]) -> Any:
        return getattr(self._actor(), method).remote(self._place, *order)

    def _actor(self) -> Any:
        try:
            return self._home.handle()
        except ValueError as error:
            raise FilesError("the controller, which holds the files of this run, is gone") from error


def repeated(start: Callable[[bool], Any], give_up_s: float = GIVE_UP_S) -> Any:
    """Result of a call to the controller's files, which is started again if the network failed.

    `start(first)` starts it and returns its reference.
    """
    began, first = time.monotonic(), True
    while True:
        try:
            return ray.get(start(first), timeout=CALL_S)
        except RayTaskError as error:
            if isinstance(error.cause, FilesError):  # the actor's answer
                raise type(error.cause)(str(error.cause)) from None
            raise FilesError(f"the controller's files: {type(error.cause).__name__}: {error.cause}") from error
        except ActorDiedError as error:
            raise FilesError("the controller, which holds the files of this run, is gone") from error
        except (RayError, GetTimeoutError) as error:
            if time.monotonic() - began >= give_up_s:
                raise FilesError(f"the controller's files cannot be reached ({type(error).__name__})") from error
        first = False
        time.sleep(AGAIN_S)


_ACTOR = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=IN_FLIGHT, concurrency_groups={LOG_GROUP: 1})(
    FilesActor
)
