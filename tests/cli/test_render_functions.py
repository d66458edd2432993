"""The table of reward functions at the end of a run."""

from rich.console import Console

from rollart.cli.render import show_report
from rollart.observe.report import Report
from rollart.types.reward_use import RewardUse, bucket


def test_use_of_functions_is_shown_without_columns_that_are_empty() -> None:
    remote = RewardUse(calls=1200, failed=2, requests=1300, retries=98, cold_starts=3, bytes_out=2_500_000)
    remote.latencies, remote.replica_s, remote.cost = {bucket(0.25): 1200}, 300.0, 0.75
    local = RewardUse(calls=40, replica_s=1.5, latencies={bucket(0.01): 40})
    console = Console(record=True, width=200)
    show_report(console, Report(name="r", functions={"math/judged": remote, "math/right": local}))
    lines = console.export_text().splitlines()
    lines = [line.strip() for line in lines]
    (head,) = [line for line in lines if line.startswith("reward function")]
    assert "retries" in head
    assert "hedges" not in head
    assert "killed" not in head
    (row,) = [line for line in lines if line.startswith("math/judged")]
    for cell in ("1,200", "98", "2.5", "300.00 s", "0.75"):
        assert cell in row
