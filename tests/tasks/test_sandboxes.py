"""The shared source of sandboxes of a worker process."""

from rollart.ports.factory import load
from rollart.tasks.sandboxes import Lease, shared_sandboxes
from rollart.types.sandboxes import Mechanism

FACTORY = f"{__name__}:Recorded"


class Recorded:
    """A source that counts how often it was made and closed."""

    made = 0
    closed = 0

    def __init__(self) -> None:
        type(self).made += 1

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return ()

    def close(self) -> None:
        type(self).closed += 1


def test_a_factory_has_one_source_per_process():
    made = load(FACTORY).made
    assert shared_sandboxes(FACTORY) is shared_sandboxes(FACTORY)
    assert load(FACTORY).made <= made + 1


def test_a_source_is_closed_with_its_last_lease_and_made_again_when_needed():
    one, other = Lease(FACTORY), Lease(FACTORY)
    source, closed = shared_sandboxes(FACTORY), load(FACTORY).closed
    one.close()
    one.close()
    assert shared_sandboxes(FACTORY) is source
    other.close()
    assert load(FACTORY).closed == closed + 1
    assert shared_sandboxes(FACTORY) is not source


def test_a_lease_alone_makes_no_source():
    made = load(FACTORY).made
    Lease(f"{__name__}:Unused").close()
    assert load(FACTORY).made == made
