"""Sandboxes of the tasks of an environment worker: one source for each factory, shared by all episodes of the process.

A task names the factory of its source, so that the same task runs in bubblewrap, gVisor or a remote service. A shared
source is what makes a warm pool useful: sandboxes with equal specs are interchangeable between tasks and episodes.
"""

import atexit
import threading

from rollart.ports.factory import load
from rollart.ports.sandbox import Sandboxes

BUBBLEWRAP = "rollart.backends.sandboxes.bubblewrap:BubblewrapSandboxes"
"""Factory of the default source."""

_lock = threading.Lock()
_sources: dict[str, Sandboxes] = {}


def shared_sandboxes(factory: str = BUBBLEWRAP) -> Sandboxes:
    """The source of this process that `factory` makes; it is closed when the process ends."""
    with _lock:
        if factory not in _sources:
            _sources[factory] = load(factory)()
            atexit.register(_sources[factory].close)
        return _sources[factory]
