"""The Ray runtime on several nodes: placement by label, nodes that lose power, and links that are cut."""

import time

import pytest
from controllers import Controller

NOTICE_S = 15.0
"""Row 32 of the faults: what ran on a dead node restarts elsewhere within this time, so it is noticed before."""
CUT_S, PERIOD_S = 5.0, 30.0


def test_workers_run_where_their_labels_say_and_a_node_without_power_is_noticed(cluster):
    _, h800, h20 = cluster.nodes
    with Controller(cluster) as controller:
        assert h800.address in controller.spawn("reward/a/0.0", "H800")["node"]
        assert h20.address in controller.spawn("reward/b/0.0", "H20")["node"]
        controller.tell(stream=True)
        h800.power_off()
        began = time.monotonic()
        assert controller.until("died")["died"] == "reward/a/0.0"
        assert time.monotonic() - began < NOTICE_S
        placed = controller.spawn("reward/a/0.1", "H800", "H20")
        assert h20.address in placed["node"]
        assert placed["why"]
        assert time.monotonic() - began < NOTICE_S + 5
        assert all(complete for _, complete in controller.report().values())
        h800.start()
        cluster.start_ray(1)
        assert h800.address in controller.spawn("reward/c/0.0", "H800")["node"]
        h800.kill()
        began = time.monotonic()
        assert controller.until("died")["died"] == "reward/c/0.0"
        assert time.monotonic() - began < NOTICE_S / 3
        h800.start()
        cluster.start_ray(1)


def test_a_cut_link_only_delays(cluster):
    cuts(cluster, rounds=1)


@pytest.mark.long
def test_a_link_that_is_cut_again_and_again_only_delays(cluster):
    cuts(cluster, rounds=3)


def cuts(cluster, rounds):
    """Row 34 of the faults: 5 s without a link, every 30 s, while messages stream to the node and back."""
    _, h800, _ = cluster.nodes
    with Controller(cluster) as controller:
        controller.spawn("reward/a/0.0", "H800")
        controller.spawn("reward/b/0.0", "H20")
        controller.tell(stream=True)
        for number in range(rounds):
            if number:
                time.sleep(PERIOD_S - CUT_S)
            h800.cut()
            time.sleep(CUT_S)  # the fault itself; nothing is waited for
            h800.restore()
        report = controller.report()
        assert sorted(report) == ["reward/a/0.0", "reward/b/0.0"]
        assert all(complete for _, complete in report.values())
        assert min(sent for sent, _ in report.values()) > 50
        assert not controller.deaths()
        controller.spawn("reward/c/0.0", "H800")
