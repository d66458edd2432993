"""Which cgroup tree is used, from made-up folders of every version; and the words for it."""

from pathlib import Path

import pytest

from rollart.backends.sandboxes.launcher import seccomp
from rollart.backends.sandboxes.launcher.cgroups import Group, find
from rollart.backends.sandboxes.machine import mechanisms


def files(folder: Path, **contents: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own"
    path.write_text(text)
    return path


def test_version_1_below_the_own_group(tmp_path: Path) -> None:
    memory = files(tmp_path / "memory" / "job", cgroup__procs="")
    pids = files(tmp_path / "pids", cgroup__procs="")
    tree = find(tmp_path, own(tmp_path, "4:memory:/job\n3:pids:/\n2:cpu:/\n0::/\n"))
    assert (tree.version, tree.memory, tree.pids, tree.missing) == (1, memory, pids, "")


def test_version_1_in_a_container_that_sees_its_own_group_as_the_top(tmp_path: Path) -> None:
    memory = files(tmp_path / "memory", cgroup__procs="")
    tree = find(tmp_path, own(tmp_path, "4:memory:/docker/abc\n3:pids:/docker/abc\n"))
    assert (tree.version, tree.memory, tree.pids) == (1, memory, None)
    assert tree.missing == "no writable cgroup for pids"


def test_version_2_where_delegated(tmp_path: Path) -> None:
    names = {"cgroup__controllers": "cpu memory pids", "cgroup__subtree_control": ""}
    files(tmp_path, **names)
    mine = files(tmp_path / "user", cgroup__procs="", **names)
    tree = find(tmp_path, own(tmp_path, "0::/user\n"))
    assert (tree.version, tree.memory, tree.pids) == (2, mine, mine)
    assert (mine / "cgroup.subtree_control").read_text() == "+memory +pids"
    group = Group(tree, "box")
    files(mine / "box", memory__max="max", memory__swap__max="max", pids__max="max")
    files(mine / "box", memory__events="low 0\noom 3\noom_kill 2\n", pids__events="max 5\n", pids__current="4")
    group.make(64, 16)
    assert (mine / "box" / "memory.max").read_text() == str(64 * 2**20)
    assert (mine / "box" / "memory.swap.max").read_text() == "0"
    assert (mine / "box" / "pids.max").read_text() == "16"
    assert (group.out_of_memory(), group.forks_refused(), group.processes()) == (2, 5, 4)


@pytest.mark.parametrize("controllers", ["cpu", "memory"])
def test_version_2_without_the_controllers_is_not_used(tmp_path: Path, controllers: str) -> None:
    files(tmp_path, cgroup__controllers=controllers, cgroup__subtree_control="", cgroup__procs="")
    tree = find(tmp_path, own(tmp_path, "0::/\n"))
    assert (tree.version, tree.folders()) == (0, [])
    assert Group(tree, "box").remove()
    assert Group(tree, "box").processes() is None


def test_a_sum_of_what_is_in_force() -> None:
    none = {"version": 0, "memory": False, "pids": False, "missing": "no cgroups"}
    about = {"rootless": True, "owner": None, "seccomp": False, "overlays": False, "host_base": "", "cgroups": none}
    found = {mechanism.part: mechanism for mechanism in mechanisms(about)}
    assert not found["system calls"].in_force
    assert "a copy of the base" in found["files"].by
    assert "watchdog" in found["memory"].by
    assert "Delegate=yes" in found["processes"].by


@pytest.mark.parametrize("machine", seccomp.TABLES)
def test_every_path_of_the_filter_ends_in_a_verdict(machine: str) -> None:
    """No jump leaves the program, and the last instruction returns."""
    code = seccomp.program(machine)
    count = len(code) // 8
    assert count < 4096
    for number in range(count):
        operation, if_true, if_false = code[number * 8], code[number * 8 + 2], code[number * 8 + 3]
        if operation & 0x07 == 0x05:
            assert number + 1 + max(if_true, if_false) < count
    assert code[-8] == seccomp.RETURN
