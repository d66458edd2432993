"""What tests of several packages share."""

import os
from collections.abc import Iterator

# Before torch is loaded, and for all that tests start: threads that wait for each other sleep instead of spinning. On a
# busy machine that is the difference between slow and standing still.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import HealthCheck, settings
from rank_server import RankServer

from rollart.backends.native.kernels import OFF, native_kernels

# A busy machine is slow now and then; an example that takes long, or is long in the making, is no failure.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray on this machine, started once per file: it takes seconds, and other files start a Ray of their own."""
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
    monkeypatch.setattr("rollart.backends.trainers.child_ranks.start_process", rank_server.start)


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
