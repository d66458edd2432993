"""Sandboxes of the tasks of an environment worker: one source for each factory, shared by all episodes of the process.

A task names the factory of its source, so that the same task runs in bubblewrap, gVisor or a remote service. A shared
source is what makes a warm pool useful: sandboxes with equal specs are interchangeable between tasks and episodes.

A source lives from its first use to the close of its last `Lease`, or to the end of the process without one.
"""

import atexit
import threading
from collections import Counter

from rollart.ports.factory import load
from rollart.ports.sandbox import Sandboxes

BUBBLEWRAP = "rollart.backends.sandboxes.bubblewrap:BubblewrapSandboxes"
"""Factory of the default source."""

_lock = threading.Lock()
_sources: dict[str, Sandboxes] = {}
_leases: Counter[str] = Counter()


def shared_sandboxes(factory: str = BUBBLEWRAP) -> Sandboxes:
    """The source of this process that `factory` makes."""
    with _lock:
        if factory not in _sources:
            _sources[factory] = load(factory)()
            atexit.register(_sources[factory].close)
        return _sources[factory]


class Lease:
    """Held by a worker of a task while it may use a source: killed workers apart, nothing of it is left afterwards."""

    def __init__(self, factory: str = BUBBLEWRAP) -> None:
        self._factory = factory
        self._held = True
        with _lock:
            _leases[factory] += 1

    def close(self) -> None:
        """Close the source if this is the last lease. Closing twice has no effect."""
        with _lock:
            if not self._held:
                return
            self._held = False
            _leases[self._factory] -= 1
            source = _sources.pop(self._factory, None) if not _leases[self._factory] else None
        if source is not None:
            atexit.unregister(source.close)
            source.close()
