"""What tests of several packages share."""

import pytest
from rank_server import RankServer


@pytest.fixture(scope="session")
def rank_server():
    server = RankServer()
    yield server
    server.close()


@pytest.fixture
def forked_ranks(rank_server, monkeypatch):
    """Trainers with several ranks start in a moment."""
    monkeypatch.setattr("rollart.backends.trainers.ranks.start_process", rank_server.start)
