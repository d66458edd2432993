"""What the tests of clusters share."""

import pytest

collect_ignore_glob = ["*_driver.py"]
"""Scripts that run on nodes."""


@pytest.fixture(scope="session")
def cluster():
    """Three nodes, made once: it takes seconds. Every test leaves all of them up."""
    from ray_nodes import RayNodes

    with RayNodes("cpu", "H800", "H20") as nodes:
        yield nodes
