"""What tests of several packages share."""

from collections.abc import Iterator

import pytest
from rank_server import RankServer

from rollart.backends.native.kernels import OFF, native_kernels


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


@pytest.fixture(params=["native", "torch"])
def maths(request, monkeypatch):
    """With the native kernels, where there is a compiler, and without."""
    native_kernels.cache_clear()
    if request.param == "torch":
        monkeypatch.setenv(OFF, "0")
    elif native_kernels() is None:
        pytest.skip("no C++ compiler")
    yield request.param
    native_kernels.cache_clear()
