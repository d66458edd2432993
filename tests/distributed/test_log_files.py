"""Logs of other nodes in the run folder: every byte once, in order, and nothing outside of the folder."""

import pytest

from rollart.distributed import log_files
from rollart.distributed.log_files import FULL, LogFiles, log_on_node, remove_log
from rollart.types.errors import FilesError

NAME = "engine/H20/0.0"


def test_lines_that_are_sent_again_are_appended_once(tmp_path):
    logs = LogFiles(tmp_path)
    assert logs.append(NAME, 0, b"") == 0
    log = tmp_path / f"{NAME}.log"
    assert log.read_bytes() == b""
    assert logs.append(NAME, 0, b"one\n") == 4
    assert logs.append(NAME, 0, b"one\ntwo\n") == 8
    assert logs.append(NAME, 4, b"two\n") == 8
    assert logs.append(NAME, 0, b"on") == 8
    assert log.read_bytes() == b"one\ntwo\n"


def test_a_gap_is_not_written(tmp_path):
    logs = LogFiles(tmp_path)
    logs.append(NAME, 0, b"one\n")
    assert logs.append(NAME, 8, b"three\n") == 4
    assert (tmp_path / f"{NAME}.log").read_bytes() == b"one\n"


def test_a_log_of_an_earlier_session_goes_on(tmp_path):
    LogFiles(tmp_path).append(NAME, 0, b"first session\n")
    LogFiles(tmp_path).append(NAME, 0, b"second session\n")
    assert (tmp_path / f"{NAME}.log").read_bytes() == b"first session\nsecond session\n"


def test_a_log_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "LOG_BYTES", 8)
    logs = LogFiles(tmp_path)
    assert logs.append(NAME, 0, b"1234567") == 7
    assert logs.append(NAME, 7, b"89") == 9
    assert logs.append(NAME, 9, b"more") == 13
    assert (tmp_path / f"{NAME}.log").read_bytes() == b"123456789" + FULL


@pytest.mark.parametrize("name", ["../journal", "engine/../../x", "/etc/x", "", "a//b", ".hidden", "a\0b", "out/x"])
def test_nothing_outside_of_the_folder_is_written(tmp_path, name):
    root, outside = tmp_path / "logs", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "out").symlink_to(outside)
    with pytest.raises(FilesError):
        LogFiles(root).append(name, 0, b"line\n")
    assert list(outside.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "outside"]


def test_more_than_a_call_may_append_is_refused(tmp_path):
    with pytest.raises(FilesError, match="at once"):
        LogFiles(tmp_path).append(NAME, 0, bytes(log_files.APPEND_BYTES + 1))


def test_a_log_that_was_sent_leaves_no_folder(tmp_path):
    first, second = (log_on_node(tmp_path, "run-1", name) for name in (NAME, "engine/H20/1.0"))
    for path in (first, second):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    remove_log(first, tmp_path)
    assert second.is_file()
    remove_log(second, tmp_path)
    assert list(tmp_path.iterdir()) == []
