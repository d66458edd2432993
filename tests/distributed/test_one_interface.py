"""Servers that are kept to one interface; that they are is tested on nodes (`tests/cluster`)."""

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from rollart.distributed import node_environment, one_interface, ray_start
from rollart.types.errors import RequestError


def test_what_a_worker_starts_is_not_affected(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for before in ({}, {"LD_PRELOAD": "/lib/mine.so:/lib/other.so"}):
        node = before | one_interface.variables("10.88.0.1", before)
        assert node["LD_PRELOAD"].startswith(str(tmp_path))
        one_interface.remove_variables(node)
        assert node == before
        one_interface.remove_variables(node)
        assert node == before


def test_loopback_needs_nothing():
    assert one_interface.variables("127.0.0.1", {}) == {}
    assert one_interface.variables("::1", {}) == {}


def test_without_a_compiler_nothing_is_started(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(RequestError, match=r"no C compiler .* install one"):
        one_interface.variables("10.88.0.1", {})


def test_a_node_without_token_is_refused():
    with pytest.raises(RequestError, match="RAY_AUTH_TOKEN"):
        ray_start.environment("127.0.0.1", {})
    variables = ray_start.environment("127.0.0.1", {"RAY_AUTH_TOKEN": "secret"})
    assert variables["RAY_AUTH_MODE"] == "token"


def test_a_cut_of_five_seconds_passes_and_a_dead_node_is_noticed_in_time():
    period_s, timeout_s = node_environment.HEALTH_CHECK_PERIOD_S, node_environment.HEALTH_CHECK_TIMEOUT_S
    last_answer_s = node_environment.HEALTH_CHECK_FAILURES * (period_s + timeout_s) - period_s
    assert last_answer_s > 5.0 * 1.3 + 1.0  # TCP repeats after up to 1.3 times the cut
    assert last_answer_s + period_s < 15.0 - 3.0  # and what ran there starts again


def test_the_own_address_may_be_found_by_the_way_to_the_head():
    assert ray_start.own_address(["--head", "--node-ip-address=10.0.0.1"]) == "10.0.0.1"
    assert ray_start.own_address(["--address=127.0.0.1:6380", "--node-ip-address=auto"]) == "127.0.0.1"
    for options in ([], ["--head", "--node-ip-address=auto"]):
        with pytest.raises(RequestError, match="--node-ip-address is missing"):
            ray_start.own_address(options)
