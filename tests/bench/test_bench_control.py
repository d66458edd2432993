"""`rollart bench control`: its figures measure what their names state."""

import json
import math
import sys

import pytest

from rollart.app.huge_pages import TUNABLES, large_pages
from rollart.bench.control import HEADLINE, REPEATS, SIZES, _median, growth_exponent, measure, summarise
from rollart.cli.main import main

KEYS = {"us_per_turn", "step_cpu_s", "peak_mb", "growth_exponent", "sizes"}


def test_json_has_the_keys_and_stderr_the_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rollart", "bench", "control", "--sizes", "64,32", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert set(result) == KEYS
    assert [size["trajectories"] for size in result["sizes"]] == [32, 64]
    assert result["step_cpu_s"] == result["sizes"][-1]["step_cpu_s"]
    assert all(size["turns"] > 20 * size["trajectories"] and size["peak_mb"] > 1 for size in result["sizes"])
    assert "64 trajectories" in err


@pytest.mark.parametrize("sizes", ["many", "8"])
def test_impossible_sizes_are_refused(
    sizes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rollart", "bench", "control", "--sizes", sizes, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""


def test_a_table_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["rollart", "bench", "control", "--sizes", "32"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "µs per turn" in capsys.readouterr().out


def test_a_size_fills_its_environments() -> None:
    size = measure(48)
    assert size["steps"] == 2
    assert size["us_per_turn"] * size["turns"] == pytest.approx(size["cpu_s"] * 1e6)


def test_the_headline_is_one_of_the_sizes_whatever_their_order() -> None:
    assert HEADLINE in SIZES
    sizes = [{"trajectories": n, "us_per_turn": n, "step_cpu_s": n * n, "peak_mb": n} for n in SIZES]
    result = summarise(sizes)
    assert result["us_per_turn"] == HEADLINE
    assert result["growth_exponent"] == pytest.approx(2.0)


def test_growth_needs_two_sizes() -> None:
    assert growth_exponent([(100, 3.0)]) is None
    exponent = growth_exponent([(10, 1.0), (100, 10**1.1), (1000, 10**2.2)])
    assert exponent is not None
    assert math.isclose(exponent, 1.1)


def test_large_pages_are_asked_for_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr("sys.platform", "linux")
    asked = large_pages({"HOME": "/"})
    assert asked == {"HOME": "/", "PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": TUNABLES}
    assert large_pages(asked) == asked, "a restart is not restarted"
    assert large_pages({"PYTHONMALLOC": "debug"}) == {"PYTHONMALLOC": "debug"}
    for libc in (("", ""), ("musl", "1.2"), ("glibc", "2.31")):
        monkeypatch.setattr("platform.libc_ver", lambda libc=libc: libc)
        assert large_pages({}) == {}


def test_of_repeated_runs_the_one_in_the_middle_counts() -> None:
    runs = [{"cpu_s": seconds, "name": name} for seconds, name in ((3.0, "slow"), (1.0, "quick"), (2.0, "middle"))]
    assert _median(runs)["name"] == "middle"
    assert all(count % 2 for count in REPEATS.values())
    assert REPEATS.keys() <= set(SIZES)
