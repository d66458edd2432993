import pytest

from rollart.backends.native.kernels import OFF, native_kernels


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
