"""The shared source of sandboxes of a worker process."""

from rollart.ports.factory import load
from rollart.tasks.sandboxes import shared_sandboxes
from rollart.types.sandboxes import Mechanism

FACTORY = f"{__name__}:Recorded"


class Recorded:
    """A source that counts how often it was made."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return ()

    def close(self) -> None:
        pass


def test_a_factory_has_one_source_per_process():
    assert shared_sandboxes(FACTORY) is shared_sandboxes(FACTORY)
    assert load(FACTORY).made == 1
