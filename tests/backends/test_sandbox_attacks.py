"""Attacks from inside a sandbox: each is contained, has a typed result, and the next episode starts clean.

Every attack runs as a program of the agent in a sandbox of the most powerful launcher that there is on this machine: as
root, if the tests run as root. After each the sandbox is reset and has to be as new.
"""

import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from sandbox_parts import own_sandboxes, public_folder

from rollart.backends.sandboxes.bubblewrap import BubblewrapSandbox, BubblewrapSandboxes
from rollart.backends.sandboxes.launcher.init_program import MACHINES
from rollart.types.errors import SandboxFileError
from rollart.types.sandboxes import ExecResult, Limits, SandboxSpec

SECRET = "4f1d-secret-of-the-host"
LIMITS = Limits(
    time_s=120.0, memory_mb=96, processes=40, open_files=128, file_mb=16, disk_mb=24, files=800, output_kb=32
)


class World(NamedTuple):
    """A machine with things to steal, and a source of sandboxes on it."""

    sandboxes: BubblewrapSandboxes
    folder: Path
    """Of the host, readable for everybody, with `grader/reward.txt` and `victim.pid`."""
    victim: int
    """A process of the host."""
    port: int
    """Of a server of the host, on all its addresses."""
    abstract: str
    """Name of an abstract socket of the host."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    if not Path("/usr/bin/python3").exists():
        pytest.skip("attacks are Python programs, and there is no /usr/bin/python3")
    abstract = f"rollart-attack-{os.getpid()}"
    with (
        public_folder() as folder,
        own_sandboxes(folder / "sandboxes", warm=1) as sandboxes,
        socket.create_server(("0.0.0.0", 0)) as server,
        socket.socket(socket.AF_UNIX) as hidden,
        subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, "API_KEY": SECRET}
        ) as victim,
    ):
        hidden.bind(f"\0{abstract}")
        hidden.listen()
        (folder / "grader").mkdir()
        (folder / "grader" / "reward.txt").write_text("0\n")
        (folder / "secret.txt").write_text(SECRET)
        try:
            yield World(sandboxes, folder, victim.pid, server.getsockname()[1], abstract)
        finally:
            victim.kill()


@pytest.fixture
def sandbox(world: World) -> Iterator[BubblewrapSandbox]:
    made = world.sandboxes.create(SandboxSpec(limits=LIMITS, env=(("PYTHONDONTWRITEBYTECODE", "1"),)))
    yield made
    made.reset()
    clean(made)
    made.close()


def clean(sandbox: BubblewrapSandbox) -> None:
    """The next episode: no files, no processes, all limits unused."""
    found = sandbox.exec(
        ["sh", "-c", "ls -A . /tmp /dev/shm ~ /var/tmp; ls /proc | grep -c '^[0-9]'; df -k / | tail -1"]
    )
    assert found.ok, found
    assert found.exceeded == ()
    *files, processes, disk = found.stdout.decode().split("\n")[:-1]
    assert [line for line in files if line and not line.endswith(":")] == []
    assert int(processes) <= 6
    assert int(disk.split()[2]) < 100, disk


def attack(sandbox: BubblewrapSandbox, program: str, **values: object) -> ExecResult:
    """Run a Python program; `values` are variables of it."""
    head = "import ctypes, os, socket, sys, time\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    head += "".join(f"{name} = {value!r}\n" for name, value in values.items())
    return sandbox.exec(["/usr/bin/python3", "-c", head + program])


SAYS_SO = """
def tried(what, call):
    try:
        result = call()
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        print("refused", what, type(error).__name__, error)
    else:
        print("DONE", what, result)
def system(what, *arguments):
    result = libc.syscall(*arguments)
    print("DONE" if result >= 0 else "refused", what, result, os.strerror(ctypes.get_errno()))
"""


def refused(result: ExecResult) -> ExecResult:
    """All that was tried was refused, one by one."""
    assert b"DONE" not in result.stdout, result.stdout.decode()
    assert b"refused" in result.stdout, result
    assert result.ok, result
    return result


# --- network --------------------------------------------------------------------------------------------------------


def test_the_internet_and_the_metadata_address_are_out_of_reach(sandbox: BubblewrapSandbox, world: World) -> None:
    program = """
for address in ("1.1.1.1", "169.254.169.254", "10.0.0.1", "192.168.0.1", host):
    for port in (80, 443, 53, 6379, 8265, port_of_host):
        tried((address, port), lambda: socket.create_connection((address, port), timeout=2))
tried("dns", lambda: socket.getaddrinfo("example.org", 80))
"""
    host = socket.gethostbyname(socket.gethostname())
    refused(attack(sandbox, SAYS_SO + program, host=host, port_of_host=world.port))


def test_servers_of_the_host_on_loopback_are_out_of_reach(sandbox: BubblewrapSandbox, world: World) -> None:
    refused(
        attack(
            sandbox,
            SAYS_SO + "tried('loopback', lambda: socket.create_connection(('127.0.0.1', port)))",
            port=world.port,
        )
    )


def test_the_only_interface_is_loopback_and_none_can_be_added(sandbox: BubblewrapSandbox) -> None:
    program = """
assert [name for _, name in socket.if_nameindex()] == ["lo"], socket.if_nameindex()
import fcntl, struct
control = socket.socket()
tried("up", lambda: fcntl.ioctl(control, 0x8914, struct.pack("16sh", b"lo", 0)))
tried("tun", lambda: os.open("/dev/net/tun", os.O_RDWR))
"""
    refused(attack(sandbox, SAYS_SO + program))


def test_sockets_around_the_network_namespace_are_refused(sandbox: BubblewrapSandbox) -> None:
    """Virtual machines' vsock is not separated by namespaces, nor are crypto and raw packet sockets harmless."""
    program = """
AF_VSOCK, AF_ALG, AF_PACKET, AF_KEY, AF_BLUETOOTH, AF_XDP, AF_TIPC, AF_CAN = 40, 38, 17, 15, 31, 44, 30, 29
for family in (AF_VSOCK, AF_ALG, AF_PACKET, AF_KEY, AF_BLUETOOTH, AF_XDP, AF_TIPC, AF_CAN):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        tried((family, kind), lambda: socket.socket(family, kind))
tried("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
tried("audit", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9))
"""
    refused(attack(sandbox, SAYS_SO + program))


def test_abstract_sockets_of_the_host_are_out_of_reach(sandbox: BubblewrapSandbox, world: World) -> None:
    program = "client = socket.socket(socket.AF_UNIX)\ntried('abstract', lambda: client.connect('\\0' + name))"
    refused(attack(sandbox, SAYS_SO + program, name=world.abstract))


# --- files of the host ----------------------------------------------------------------------------------------------


def test_files_of_the_host_are_not_there(sandbox: BubblewrapSandbox, world: World) -> None:
    program = """
assert os.listdir("/home") == ["agent"]
for path in (secret, grader, "/etc/shadow", "/root/.ssh", "/mnt", "/srv", "/opt", "/boot", "/sys", "/proc/kcore",
             "/var/run/docker.sock", "/run/containerd", "/run/systemd"):
    tried(path, lambda: os.listdir(path) if os.path.isdir(path) else open(path).read(1))
"""
    secret, grader = str(world.folder / "secret.txt"), str(world.folder / "grader")
    refused(attack(sandbox, SAYS_SO + program, secret=secret, grader=grader))


def test_the_graders_files_cannot_be_read_or_written(sandbox: BubblewrapSandbox, world: World) -> None:
    reward = world.folder / "grader" / "reward.txt"
    program = """
for path in (reward, "/proc/1/root" + reward, "/proc/1/cwd" + reward, "/proc/self/root/../.." + reward):
    tried(path, lambda: open(path, "w").write("1"))
    tried(path, lambda: open(path).read())
"""
    refused(attack(sandbox, SAYS_SO + program, reward=str(reward)))
    assert reward.read_text() == "0\n"


def test_links_lead_nowhere_on_the_host(sandbox: BubblewrapSandbox, world: World) -> None:
    """The host reads and writes the agent's files as the agent sees them: a link is followed inside, or not at all."""
    secret = world.folder / "secret.txt"
    sandbox.exec(
        ["sh", "-c", f"ln -s {secret} stolen; ln -s / all; ln -s {world.folder} grader; mkdir out; ln -s / out/all"]
    )
    for path in (
        "stolen",
        f"all{secret}",
        "grader/secret.txt",
        "/proc/self/root" + str(secret),
        "/proc/1/root" + str(secret),
    ):
        with pytest.raises(Exception, match=r"such file|denied|not a|loop"):
            sandbox.read_file(path)
    with pytest.raises(Exception, match=r"denied|such file|Read-only|exist"):
        sandbox.write_file("grader/planted", b"")
    target = world.folder / f"down-{os.getpid()}"
    sandbox.download("out", target)
    assert list(target.iterdir()) == []
    assert sorted(path.name for path in world.folder.iterdir() if path.name == "planted") == []


def test_the_base_is_read_only(sandbox: BubblewrapSandbox) -> None:
    program = """
for path in ("/usr/planted", "/usr/bin/python3", "/etc/passwd", "/etc/ld.so.preload", "/bin/sh", "/lib/planted",
             "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/dev/planted"):
    tried(path, lambda: os.open(path, os.O_WRONLY | os.O_CREAT))
tried("remount", lambda: os.system("mount -o remount,rw /usr 2>/dev/null") and open("/nowhere"))
for path in ("/usr", "/etc", "/proc", "/dev"):
    tried(path, lambda: os.rename(path, "/gone"))
"""
    refused(attack(sandbox, SAYS_SO + program))


def test_devices_cannot_be_made_or_opened(sandbox: BubblewrapSandbox) -> None:
    program = """
import stat
tried("block device", lambda: os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0)))
tried("memory", lambda: os.mknod("mem", 0o600 | stat.S_IFCHR, os.makedev(1, 1)))
for path in ("/dev/vda", "/dev/sda", "/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/loop-control", "/dev/fuse", "/dev/tty",
             "/dev/vsock"):
    tried(path, lambda: os.open(path, os.O_RDWR))
"""
    refused(attack(sandbox, SAYS_SO + program))


def test_open_files_of_the_supervisor_do_not_leak(sandbox: BubblewrapSandbox) -> None:
    """A command has three open files, none of which leads to a file of the host."""
    program = """
print(sorted(int(name) for name in os.listdir("/proc/self/fd"))[:4])
for name in (0, 1, 2):
    print(os.readlink(f"/proc/self/fd/{name}").split(":")[0])
tried("input", lambda: os.write(0, b"x"))
tried("output", lambda: os.ftruncate(1, 0))
for number in range(3, 1000):
    try:
        os.fchdir(number)
    except OSError:
        continue
    print("DONE", number)
"""
    result = refused(attack(sandbox, SAYS_SO + program))
    assert result.stdout.startswith(b"[0, 1, 2, 3]\n/memfd\npipe\npipe\n"), result.stdout


# --- processes ------------------------------------------------------------------------------------------------------


def test_processes_of_the_host_are_not_seen(sandbox: BubblewrapSandbox, world: World) -> None:
    program = """
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
assert len(pids) <= 3, pids
tried("environ", lambda: open(f"/proc/{victim}/environ").read())
assert os.getppid() == 0
for pid in pids:
    if pid != os.getpid():
        tried("environ", lambda: open(f"/proc/{pid}/environ").read())
tried("memory", lambda: open(f"/proc/{victim}/mem"))
"""
    refused(attack(sandbox, SAYS_SO + program, victim=world.victim))


def test_signals_reach_no_process_of_the_host(sandbox: BubblewrapSandbox, world: World) -> None:
    program = """
tried("victim", lambda: os.kill(victim, 9))
for pid in (1, -1):
    try:
        os.kill(pid, 9)
    except OSError:
        pass
tried("group", lambda: os.killpg(victim, 9))
"""
    refused(attack(sandbox, SAYS_SO + program, victim=world.victim))
    assert sandbox.exec(["true"]).ok
    os.kill(world.victim, 0)


def test_ptrace_and_memory_of_other_processes_are_refused(sandbox: BubblewrapSandbox) -> None:
    program = """
child = os.fork()
if child == 0:
    time.sleep(30)
buffer = ctypes.create_string_buffer(8)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
system("attach", 101, 16, child, 0, 0)
system("seize", 101, 0x4206, child, 0, 0)
system("traceme", 101, 0, 0, 0, 0)
system("read", 310, child, vector, 1, vector, 1, 0)
system("write", 311, child, vector, 1, vector, 1, 0)
os.kill(child, 9)
"""
    refused(attack(sandbox, SAYS_SO + program))


def test_the_keeper_cannot_be_harmed(sandbox: BubblewrapSandbox) -> None:
    program = """
import signal
for number in range(1, 65):
    try:
        os.kill(1, number)
    except OSError:
        pass
tried("stop it", lambda: open("/proc/1/oom_score_adj", "w").write("-1000") and open("/nowhere"))
tried("limits", lambda: __import__("resource").prlimit(1, 7, (0, 0)) and open("/nowhere"))
"""
    result = attack(sandbox, SAYS_SO + program)
    assert result.ok, result
    assert sandbox.exec(["sh", "-c", "kill -STOP 1; kill -KILL 1; exit 0"]).ok
    assert sandbox.exec(["true"]).ok


needs_own_keeper = pytest.mark.skipif(platform.machine() not in MACHINES, reason="not for this processor")


@needs_own_keeper
def test_memory_of_the_keeper_cannot_be_opened(sandbox: BubblewrapSandbox) -> None:
    """Who can write it can crash the keeper, which looks like a loss, or be the keeper, which has no limits."""
    program = """
for mode in ("rb", "r+b"):
    tried(mode, lambda: open("/proc/1/mem", mode))
"""
    refused(attack(sandbox, SAYS_SO + program))


AS_INIT = """
set -e
mv /bin /bin.old
mkdir /bin
cat > /bin/sh <<'END'
#!/usr/bin/dash
test $$ != 1 || echo ran > /tmp/as-init
exec /usr/bin/dash "$@"
END
chmod +x /bin/sh
cp /bin/sh /bin/env
"""


@needs_own_keeper
def test_no_program_of_a_snapshot_is_the_keeper(sandbox: BubblewrapSandbox, world: World) -> None:
    """The root folder belongs to the agent, and with it the place of the shell."""
    assert sandbox.exec(["/usr/bin/dash", "-c", AS_INIT]).ok
    snapshot = sandbox.snapshot()
    sandbox.reset(snapshot)
    assert sandbox.exec(["/usr/bin/grep", "-q", "as-init", "/bin/sh"]).ok
    assert sandbox.exec(["/usr/bin/test", "-e", "/tmp/as-init"]).exit_code == 1
    world.sandboxes.forget(snapshot)


def test_proc_self_exe_is_not_the_supervisor(sandbox: BubblewrapSandbox) -> None:
    """Neither writing to its own program nor to that of the keeper reaches a file of the host."""
    program = """
print(os.readlink("/proc/self/exe"))
for path in ("/proc/self/exe", "/proc/1/exe"):
    tried(path, lambda: open(path, "r+b"))
    tried(path, lambda: os.open(path, os.O_RDWR | os.O_TRUNC))
"""
    result = refused(attack(sandbox, SAYS_SO + program))
    assert b"/usr/bin/" in result.stdout


def test_environment_of_the_worker_is_not_passed_on(
    sandbox: BubblewrapSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", SECRET)
    result = sandbox.exec(
        ["sh", "-c", "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'"]
    )
    assert SECRET.encode() not in result.stdout
    assert b"ROLLART" not in result.stdout


# --- privileges -----------------------------------------------------------------------------------------------------


def test_no_privilege_can_be_gained(sandbox: BubblewrapSandbox) -> None:
    program = """
status = open("/proc/self/status").read()
assert "NoNewPrivs:\\t1" in status and "CapEff:\\t0000000000000000" in status and "CapBnd:\\t0000000000000000" in status
for call in (os.setuid, os.setgid, os.seteuid, os.setegid):
    tried(call.__name__, lambda: call(0))
tried("groups", lambda: os.setgroups([0]))
tried("chown", lambda: os.chown("/etc/passwd", 0, 0))
tried("chroot", lambda: os.chroot("/tmp"))
tried("nice", lambda: os.nice(-5))
tried("host name", lambda: socket.sethostname("x"))
tried("clock", lambda: time.clock_settime(time.CLOCK_REALTIME, 0))
tried("limit", lambda: __import__("resource").setrlimit(7, (100000, 100000)))
"""
    refused(attack(sandbox, SAYS_SO + program))


def test_setuid_programs_give_nothing(sandbox: BubblewrapSandbox) -> None:
    program = """
import shutil, subprocess
shutil.copy("/usr/bin/id", "id")
os.chmod("id", 0o6755)
for command in (["./id", "-u"], ["/usr/bin/su", "-c", "id -u"], ["/usr/bin/mount", "-t", "tmpfs", "none", "/tmp"]):
    if not os.path.exists(command[0]):
        continue
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    mounted = command[0].endswith("mount") and done.returncode == 0
    print("DONE" if mounted or done.stdout.strip() == "0" else "refused", command)
"""
    refused(attack(sandbox, SAYS_SO + program))


def test_namespaces_and_mounts_are_refused(sandbox: BubblewrapSandbox) -> None:
    program = """
NEW = {"user": 0x10000000, "mnt": 0x20000, "net": 0x40000000, "pid": 0x20000000, "cgroup": 0x2000000, "time": 0x80}
for name, flag in NEW.items():
    system("unshare " + name, 272, flag)
    system("clone " + name, 56, flag | 17, 0, 0, 0, 0)
system("clone3", 435, 0, 0)
system("setns", 308, 0, 0)
system("mount", 165, b"none", b"/tmp", b"tmpfs", 0, 0)
system("bind", 165, b"/", b"/tmp", 0, 4096, 0)
system("umount", 166, b"/proc", 2)
system("pivot_root", 155, b"/tmp", b"/tmp")
system("open_tree", 428, -100, b"/", 1)
system("fsopen", 430, b"tmpfs", 0)
system("move_mount", 429, 0, b"", 0, b"", 0)
"""
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of the calls are those of x86_64")
    refused(attack(sandbox, SAYS_SO + program))


def test_dangerous_system_calls_are_refused(sandbox: BubblewrapSandbox) -> None:
    program = """
calls = {"bpf": 321, "userfaultfd": 323, "perf_event_open": 298, "io_uring_setup": 425, "keyctl": 250, "add_key": 248,
         "request_key": 249, "kcmp": 312, "open_by_handle_at": 304, "name_to_handle_at": 303, "init_module": 175,
         "finit_module": 313, "kexec_load": 246, "reboot": 169, "swapon": 167, "syslog": 103, "quotactl": 179,
         "acct": 163,
         "iopl": 172, "ioperm": 173, "modify_ldt": 154, "fanotify_init": 300, "pidfd_getfd": 438, "newer": 480}
for name, number in calls.items():
    ctypes.set_errno(0)
    result = libc.syscall(number, 0, 0, 0, 0, 0, 0)
    assert result == -1 and ctypes.get_errno() in (1, 38), (name, result, ctypes.get_errno())
    print("refused", name)
"""
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of the calls are those of x86_64")
    refused(attack(sandbox, SAYS_SO + program))


def test_calls_of_another_architecture_kill_the_command(sandbox: BubblewrapSandbox) -> None:
    """x32 numbers would pass a filter that knows only those of x86_64."""
    if os.uname().machine != "x86_64":
        pytest.skip("only x86_64 has x32")
    result = attack(sandbox, "libc.syscall(0x40000000 + 39)\nprint('DONE')")
    assert (result.exit_code, result.signal) == (None, signal.SIGSYS), result


# --- limits ---------------------------------------------------------------------------------------------------------


def test_a_fork_bomb_is_contained(sandbox: BubblewrapSandbox) -> None:
    program = """
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    result = sandbox.exec(["/usr/bin/python3", "-c", "import os" + program], time_s=3.0)
    # Forty interpreters may run out of memory before the time is over.
    assert {"time", "memory"} & set(result.exceeded), result
    assert result.processes_exceeded or not limits_processes(sandbox)
    assert sandbox.exec(["true"]).ok


def limits_processes(sandbox: BubblewrapSandbox) -> bool:
    found = {mechanism.part: mechanism.by for mechanism in sandbox._source.mechanisms()}
    return found["processes"].startswith("cgroup")


def test_a_bomb_of_daemons_is_contained(sandbox: BubblewrapSandbox) -> None:
    """Processes that leave their session and parent are killed with the command, too."""
    program = """
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 3)
            while True:
                time.sleep(100)
        os._exit(0)
print("left")
"""
    result = attack(sandbox, program)
    assert result.stdout == b"left\n"
    assert sandbox.exec(["sh", "-c", "ls /proc | grep -c '^[0-9]'"]).stdout.strip() in (b"3", b"4", b"5")


def test_a_memory_bomb_is_contained(sandbox: BubblewrapSandbox) -> None:
    result = attack(sandbox, "held = []\nwhile True:\n    held.append(bytearray(os.urandom(4096)) * 256)")
    assert result.memory_exceeded or b"MemoryError" in result.stderr
    assert not result.ok
    assert not result.timed_out


def test_memory_of_several_processes_counts_together(sandbox: BubblewrapSandbox) -> None:
    program = """
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(os.urandom(1000)) * 40000
        time.sleep(80)
        os._exit(0)
print(os.wait()[1])
"""
    result = sandbox.exec(["/usr/bin/python3", "-c", "import os, time" + program], time_s=90.0)
    assert result.memory_exceeded, result


def test_shared_and_file_memory_count_too(sandbox: BubblewrapSandbox) -> None:
    """/dev/shm, memfd and System V segments are no way around the limits."""
    program = """
import errno
def fill(path):
    with open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
tried("shm", lambda: fill("/dev/shm/a"))
descriptor = os.memfd_create("x")
total = 0
try:
    while total < 1 << 30:
        total += os.write(descriptor, bytes(1 << 20))
except OSError as error:
    print("refused memfd after", total >> 20, error)
print("DONE" if total >= 1 << 30 else "refused")
"""
    result = attack(sandbox, "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + SAYS_SO + program)
    assert b"DONE" not in result.stdout, result
    assert b"refused shm" in result.stdout


def test_an_endless_loop_ends_at_its_limit(sandbox: BubblewrapSandbox) -> None:
    program = """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
"""
    result = sandbox.exec(["/usr/bin/python3", "-c", program], time_s=1.0)
    assert (result.exit_code, result.signal, result.timed_out) == (None, 9, True)
    assert result.seconds < 100


def test_a_gigabyte_of_output_is_bounded(sandbox: BubblewrapSandbox) -> None:
    result = sandbox.exec(["sh", "-c", "head -c 1000000000 /dev/zero; head -c 50000000 /dev/zero >&2"], time_s=120.0)
    assert result.ok, result
    assert len(result.stdout) + len(result.stderr) < 2 * LIMITS.output_kb * 1024 + 200
    assert result.stdout_dropped == 1_000_000_000 - LIMITS.output_kb * 1024
    assert result.exceeded == ("output",)


def test_output_of_what_stays_in_the_background_does_not_hold_the_host(sandbox: BubblewrapSandbox) -> None:
    result = sandbox.exec(["sh", "-c", "(yes & yes >&2 &) ; echo done"], keep_background=True)
    assert result.exit_code == 0
    assert sandbox.exec(["true"]).ok


def test_a_full_disk_is_the_agents(sandbox: BubblewrapSandbox) -> None:
    result = sandbox.exec(["sh", "-c", "for i in 1 2 3 4 5 6; do head -c 8000000 /dev/zero > file$i; done; exit 0"])
    assert result.disk_full
    assert "disk" in result.exceeded
    result = sandbox.exec(["sh", "-c", "echo still > /dev/null && rm file1 && echo room > file1"])
    assert result.ok
    assert not result.disk_full


def test_many_files_are_bounded(sandbox: BubblewrapSandbox) -> None:
    program = """
count = 0
try:
    while True:
        os.mkdir(f"/tmp/{count}")
        count += 1
except OSError as error:
    print("refused after", count, error)
tried("link", lambda: os.symlink("a", "b"))
tried("pipe", lambda: os.mkfifo("c"))
"""
    result = refused(attack(sandbox, SAYS_SO + program))
    assert result.disk_full


def test_holes_and_expansion_take_no_more_than_the_disk(sandbox: BubblewrapSandbox, world: World) -> None:
    """A small archive that unpacks to gigabytes, and a sparse file that a download would make real."""
    program = """
import gzip
with gzip.open("small.gz", "wb", compresslevel=9) as file:
    for _ in range(100):
        file.write(bytes(1 << 20))
print(os.path.getsize("small.gz"))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import shutil
tried("unpack", lambda: shutil.copyfileobj(gzip.open("small.gz"), open("big", "wb")))
os.unlink("big")
tried("sparse", lambda: os.truncate(open("hole", "wb").name, 1 << 40))
os.truncate("hole", 16 << 20)
for number in range(30):
    os.link("hole", f"hole{number}")
"""
    refused(attack(sandbox, SAYS_SO + program))
    with pytest.raises(Exception, match="more than"):
        sandbox.download(".", world.folder / "holes", max_bytes=100 << 20)
    assert not (world.folder / "holes").exists()


def test_strange_file_names_come_to_no_harm(sandbox: BubblewrapSandbox, world: World) -> None:
    program = """
os.mkdir("names")
os.chdir("names")
for name in ("a" * 255, "new\\nline", "\\x1b[31m", " ", "-rf", "\\udcff\\udcfe", "..hidden", "C:\\\\x", "ü" * 100):
    open(name, "w").write(name[:3].encode("utf-8", "surrogateescape").hex())
for _ in range(60):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
open("deep", "w").write("deep")
"""
    assert attack(sandbox, program).ok
    target = world.folder / f"names-{os.getpid()}"
    with pytest.raises(SandboxFileError, match="a path has more than 3000 bytes"):
        sandbox.download("names", target)
    assert [path.name for path in world.folder.iterdir() if "download" in path.name] == []
    assert sandbox.exec(["sh", "-c", "rm -r names/dddd*"]).ok
    sandbox.download("names", target)
    assert len(list(target.iterdir())) == 9


def test_a_command_cannot_outlive_its_episode(sandbox: BubblewrapSandbox) -> None:
    """A process that stays, with files deleted and open, a listening socket and shared memory."""
    program = """
file = open("/tmp/x", "wb")
file.write(bytes(1 << 22))
os.unlink("/tmp/x")
server = socket.create_server(("127.0.0.1", 5555))
if os.fork() == 0:
    os.setsid()
    time.sleep(1000)
"""
    result = sandbox.exec(["/usr/bin/python3", "-c", "import os, socket, time" + program], keep_background=True)
    assert result.ok, result
    sandbox.reset()
    result = attack(sandbox, SAYS_SO + "tried('server', lambda: socket.create_connection(('127.0.0.1', 5555)))")
    refused(result)


def test_other_episodes_are_out_of_reach(sandbox: BubblewrapSandbox, world: World) -> None:
    other = world.sandboxes.create(SandboxSpec(limits=LIMITS))
    try:
        server = b"""
import socket, time
one = socket.create_server(("127.0.0.1", 7777))
two = socket.socket(socket.AF_UNIX)
two.bind("\\0episode")
two.listen()
print("serving", flush=True)
time.sleep(1000)
"""
        other.write_file("server_of_the_other.py", server)
        script = f"echo {SECRET} > /tmp/secret; mkfifo ready; (python3 server_of_the_other.py > ready &); head -1 ready"
        assert other.exec(["sh", "-c", script], keep_background=True).stdout == b"serving\n"
        program = """
tried("files", lambda: open("/tmp/secret").read())
tried("network", lambda: socket.create_connection(("127.0.0.1", 7777)))
tried("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0episode"))
import glob
found = [path for path in glob.glob("/proc/[0-9]*/cmdline") if b"of_the_other.py\\0" in open(path, "rb").read()]
print("DONE" if found else "refused", found)
segment = libc.shmget(0x5EC, 4096, 0)
print("DONE" if segment >= 0 else "refused", "System V segment")
"""
        refused(attack(sandbox, SAYS_SO + program))
    finally:
        other.close()


# --- the mounted socket ---------------------------------------------------------------------------------------------


def test_the_mounted_socket_reaches_its_server_and_nothing_else(world: World) -> None:
    """An agent program reaches the model endpoint; it cannot replace it, and finds nothing beside it."""
    path = world.folder / "endpoint.sock"
    served: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                served.append(connection.recv(100))
                connection.sendall(b"answer")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        spec = SandboxSpec(limits=LIMITS, sockets=(("/run/model.sock", str(path)),))
        sandbox = world.sandboxes.create(spec)
        try:
            program = """
client = socket.socket(socket.AF_UNIX)
client.connect("/run/model.sock")
client.sendall(b"question")
print(client.recv(100).decode())
tried("remove", lambda: os.unlink("/run/model.sock"))
tried("replace", lambda: os.rename("/tmp", "/run/model.sock"))
tried("neighbours", lambda: open(secret))
tried("mode", lambda: os.chmod("/run/model.sock", 0o777))
"""
            result = refused(attack(sandbox, SAYS_SO + program, secret=str(world.folder / "secret.txt")))
            thread.join(60)
            assert result.stdout.startswith(b"answer\n")
            assert served == [b"question"]
            sandbox.reset()
            clean(sandbox)
        finally:
            sandbox.close()
    assert path.is_socket()
