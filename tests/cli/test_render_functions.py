"""The table of reward functions at the end of a run."""

from rich.console import Console

from rollart.cli.render import show_report
from rollart.observe.report import Report
from rollart.types.reward_use import RewardUse, bucket


def test_use_of_functions_is_shown_without_columns_that_are_empty() -> None:
    remote = RewardUse(calls=1200, failed=2, requests=1300, retries=98, cold_starts=3, bytes_out=2_500_000)
    remote.latencies, remote.replica_s, remote.cost = {bucket(0.25): 1200}, 300.0, 0.75
    local = RewardUse(calls=40, replica_s=1.5, latencies={bucket(0.01): 40})
    console = Console(record=True, width=80)
    report = Report(name="r", functions={"math/judged by a model": remote, "math/right": local})
    show_report(console, report)
    lines = [line.strip() for line in console.export_text().splitlines()]
    first, second = [line for line in lines if line.startswith("reward function")]
    assert "failed" in first
    assert "killed" not in first
    assert "retries" in second
    assert "hedges" not in second
    calls, service = [line for line in lines if line.startswith("math/judged by a model")]
    assert "1,200" in calls
    for cell in ("98", "3", "2.5", "300.00 s", "0.75"):
        assert cell in service
    assert [line for line in lines if line.startswith("math/right")][1].split() == ["math/right", "1.50", "s"]


def test_names_are_no_markup() -> None:
    console = Console(record=True, width=80)
    show_report(console, Report(name="a[/b]", mode="rollart", functions={"[math]/x": RewardUse(calls=1)}))
    text = console.export_text()
    assert "a[/b] · rollart" in text
    assert "[math]/x" in text


def test_a_run_without_functions_has_no_such_table() -> None:
    console = Console(record=True, width=80)
    show_report(console, Report(name="r"))
    assert "reward function" not in console.export_text()
