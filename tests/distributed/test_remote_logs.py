"""What a node keeps of logs."""

import os
import time

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rollart[ray]'")

from rollart.distributed.remote_logs import KEPT_S, _remove_old


@pytest.mark.parametrize(("age_s", "stays"), [(KEPT_S - 60, True), (KEPT_S + 60, False)])
def test_logs_that_were_never_sent_are_kept_for_a_week(tmp_path, age_s, stays):
    logs = {name: tmp_path / name / "engine" / "0.log" for name in ("own", "earlier")}
    for log in logs.values():
        log.parent.mkdir(parents=True)
        log.touch()
        for path in (log, log.parent, log.parent.parent):
            os.utime(path, (0, time.time() - age_s))
    _remove_old(tmp_path, "own")
    assert logs["own"].is_file()
    assert logs["earlier"].is_file() == stays
