"""What tests of several packages share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray on this machine, started once: it takes seconds."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
    from rollart.distributed.ray_local import LocalRay

    with LocalRay():
        yield
