"""Warm pool: things that take time to make are made ahead, by a few threads, and never by too many at once.

    take(key) ──► ready? ── yes ──► it, and another is made in its place
                    └─ no ──► wait for the makers: those that are waited for go before those kept warm

Conservation rule: what was made is taken once, discarded once, or still ready. Nothing is lost to a deadline: what
becomes ready after its caller has left is adopted by the next caller, kept warm, or discarded. Callers of a key are
served in the order in which they came. Failed attempts are repeated after a back-off; after `ATTEMPTS` in a row those
who wait get the last error.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rollart.types.errors import RequestError, RollartError, SandboxFault
from rollart.types.failures import FailureKind

logger = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")

ATTEMPTS = 4
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
WARM_KEYS = 8
"""Number of keys, the last used ones, that are kept warm."""


class _Caller(Generic[T]):
    """One who waits, woken alone."""

    def __init__(self, lock: threading.Lock) -> None:
        self.woken = threading.Condition(lock)
        self.given: T | None = None
        self.error: RollartError | None = None


@dataclass
class _Shelf(Generic[T]):
    """Everything of one key. While callers wait, nothing is ready."""

    ready: deque[T] = field(default_factory=deque)
    making: int = 0
    waiting: deque[_Caller[T]] = field(default_factory=deque)
    failures: int = 0
    """In a row."""
    not_before: float = 0.0
    warm: bool = True
    """Whether some are kept ready; else only those that are waited for are made."""

    def wanted(self, warm: int) -> int:
        return len(self.waiting) + (warm if self.warm else 0)

    def missing(self, warm: int) -> int:
        return self.wanted(warm) - len(self.ready) - self.making

    @property
    def idle(self) -> bool:
        return not (self.ready or self.waiting or self.making)

    def refuse(self, error: RollartError) -> None:
        """Those who wait now get the error."""
        for caller in self.waiting:
            caller.error = error
            caller.woken.notify()
        self.waiting.clear()


class WarmPool(Generic[K, T]):
    """`make` blocks and raises `RollartError` or `OSError`; `usable` says whether a ready one still is."""

    def __init__(
        self,
        make: Callable[[K], T],
        discard: Callable[[T], None],
        usable: Callable[[T], bool],
        *,
        warm: int,
        makers: int,
        name: str,
    ) -> None:
        self._make, self._discard, self._usable = make, discard, usable
        self._warm = warm
        self._shelves: OrderedDict[K, _Shelf[T]] = OrderedDict()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """Wakes the makers."""
        self._closed = False
        self._makers = [threading.Thread(target=self._run, name=f"{name}-{n}", daemon=True) for n in range(makers)]
        for maker in self._makers:
            maker.start()

    def take(self, key: K, deadline_s: float, *, warm: bool = True) -> T:
        """One for the caller alone; raises `SandboxFault` at the deadline, or what making it raised.

        Without `warm`, none of the key is made in its place.
        """
        deadline = time.monotonic() + deadline_s
        with self._lock:
            if self._closed:
                raise _was_closed()
            shelf = self._shelves.setdefault(key, _Shelf())
            self._shelves.move_to_end(key)
            caller = _Caller[T](self._lock)
            shelf.waiting.append(caller)
            shelf.warm = warm
            self._hand_out(shelf)
            self._changed.notify_all()
            try:
                while caller.given is None and caller.error is None:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise SandboxFault(f"no sandbox was ready within {deadline_s:g} s", FailureKind.DEADLINE)
                    caller.woken.wait(left)
            finally:
                if caller in shelf.waiting:
                    shelf.waiting.remove(caller)
                self._leave(key, shelf)
            if caller.given is None:
                assert caller.error is not None
                raise caller.error
            return caller.given

    def _leave(self, key: K, shelf: _Shelf[T]) -> None:
        """Forget a key of which nothing is wanted any more."""
        if not shelf.warm and shelf.idle:
            self._shelves.pop(key, None)

    def _hand_out(self, shelf: _Shelf[T]) -> None:
        """Give what is ready to those who wait, the first come first."""
        while shelf.ready and shelf.waiting:
            found = shelf.ready.popleft()
            if self._usable(found):
                caller = shelf.waiting.popleft()
                caller.given = found
                caller.woken.notify()
            else:
                self._discard(found)

    def drop(self, unwanted: Callable[[K], bool]) -> None:
        """Discard what is ready of some keys; it is made again only when somebody waits for it."""
        with self._changed:
            keys = [key for key in self._shelves if unwanted(key)]
            for key in keys:
                self._empty(self._shelves[key])
                self._shelves[key].warm = False
                self._leave(key, self._shelves[key])

    def ready(self, key: K) -> int:
        with self._changed:
            return len(self._shelves[key].ready) if key in self._shelves else 0

    def close(self) -> None:
        """Discard everything; returns when the makers have ended."""
        with self._changed:
            self._closed = True
            for shelf in self._shelves.values():
                self._empty(shelf)
                shelf.refuse(_was_closed())
            self._changed.notify_all()
        for maker in self._makers:
            maker.join()

    def _empty(self, shelf: _Shelf[T]) -> None:
        while shelf.ready:
            self._discard(shelf.ready.popleft())

    # --- makers -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (key := self._next()) is not None:
            self._make_one(key)

    def _make_one(self, key: K) -> None:
        """In a frame of its own: an error keeps its frames alive, and those must not hold what is made later."""
        made: T | None = None
        error: RollartError | None = None
        try:
            made = self._make(key)
        except RollartError as raised:
            error = raised
        except OSError as raised:
            error = SandboxFault(f"a sandbox could not be created: {raised}")
        with self._changed:
            self._made(key, made, error)

    def _next(self) -> K | None:
        """The next key to make one of; None when the pool is closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                key, wake_at = self._most_urgent(now)
                if key is not None:
                    self._shelves[key].making += 1
                    return key
                self._changed.wait(None if wake_at is None else max(0.0, wake_at - now))
            return None

    def _most_urgent(self, now: float) -> tuple[K | None, float | None]:
        """The key, or when to look again."""
        self._cool_down()
        wanted = [(key, shelf) for key, shelf in self._shelves.items() if shelf.missing(0) > 0]
        wanted += [(key, shelf) for key, shelf in self._shelves.items() if shelf.missing(self._warm) > 0]
        for key, shelf in wanted:
            # Nothing is kept warm of what cannot be made: that would be tried for ever.
            if shelf.not_before <= now and (shelf.waiting or shelf.failures < ATTEMPTS):
                return key, None
        later = [shelf.not_before for _, shelf in wanted if shelf.not_before > now]
        return None, min(later, default=None)

    def _cool_down(self) -> None:
        """Keep only the last used keys warm."""
        for key in list(self._shelves)[:-WARM_KEYS]:
            shelf = self._shelves[key]
            self._empty(shelf)
            if shelf.idle:
                del self._shelves[key]

    def _made(self, key: K, made: T | None, error: RollartError | None) -> None:
        shelf = self._shelves.setdefault(key, _Shelf())
        shelf.making -= 1
        if error is not None:
            self._failed(shelf, error)
        elif made is not None:
            shelf.failures, shelf.not_before = 0, 0.0
            if self._closed or len(shelf.ready) >= shelf.wanted(self._warm):
                self._discard(made)
            else:
                shelf.ready.append(made)
                self._hand_out(shelf)
        self._leave(key, shelf)
        self._changed.notify_all()

    def _failed(self, shelf: _Shelf[T], error: RollartError) -> None:
        shelf.failures += 1
        shelf.not_before = time.monotonic() + min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (shelf.failures - 1))
        if isinstance(error, RequestError) or shelf.failures % ATTEMPTS == 0:
            shelf.refuse(error)
        else:
            logger.warning("creating a sandbox failed, it is tried again: %s", error)


def _was_closed() -> SandboxFault:
    return SandboxFault("the pool of sandboxes was closed")
