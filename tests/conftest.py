"""What tests of several packages share."""

from collections.abc import Iterator

import pytest
from rank_server import RankServer


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray on this machine, started once: it takes seconds."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")
    from rollart.distributed.ray_local import LocalRay

    with LocalRay():
        yield


@pytest.fixture(scope="session")
def rank_server():
    server = RankServer()
    yield server
    server.close()


@pytest.fixture
def forked_ranks(rank_server, monkeypatch):
    """Trainers with several ranks start in a moment."""
    monkeypatch.setattr("rollart.backends.trainers.ranks.start_process", rank_server.start)
