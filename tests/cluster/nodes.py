"""Machines for tests of clusters: namespaces of this machine, joined by two bridges.

    node 0 ── 10.88.0.1 ─┐                       ┌─ 10.89.0.1 ── node 0
    node 1 ── 10.88.0.2 ─┼─ bridge "cluster"     ├─ 10.89.0.2 ── node 1       bridge "public" ─ 10.89.0.250 ── outside
    …                    ┘                       ┘  …

A node has network, mount, PID and IPC namespaces of its own: its own addresses, `/tmp`, `/dev/shm`, processes and
working directory. It sees the root file system of this machine, hence the project and its environment. Both bridges are
in a namespace of their own, the switch, so nothing of this machine's network is touched, and several of these networks
can exist at the same time, with the same addresses.

Invariants: a node's processes end with its first process, which ends with the test's process; namespaces are removed
with the network, or by the next one if the process was killed. Needs root and iproute2 (`make cluster-tools`).
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "rollart-nodes-"
CLUSTER, PUBLIC = "cluster", "public"
SUBNETS = {CLUSTER: "10.88.0", PUBLIC: "10.89.0"}
OUTSIDE = 250
"""Host number of the stranger on the public network."""
RUN_S = 120.0

INIT = """
import os, signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
own_tmp, folder = sys.argv[1:]
for mount in (["--bind", own_tmp, "/tmp"], ["-t", "tmpfs", "tmpfs", "/dev/shm"], ["-t", "proc", "proc", "/proc"]):
    subprocess.run(["mount", *mount], check=True)
os.chmod("/tmp", 0o1777), os.chmod("/dev/shm", 0o1777)
os.mkdir(folder)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the orphans
print("up", flush=True)
sys.stdin.read()
"""
"""First process of a node; the others are in its PID namespace and end with it."""

_numbers = itertools.count()


class CannotMakeNodes(Exception):
    """This machine cannot make namespaces; says why."""


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMakeNodes(f"`ip {' '.join(arguments)}`: {done.stderr.strip()}")
    return done.stdout


def remove_leftovers():
    """Remove what is left of processes that were killed: namespaces, whatever still runs in them, and folders."""
    namespaces = [entry["name"] for entry in json.loads(ip("-j", "netns", "list") or "[]")]
    folders = [folder.name for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*")]
    for name in {*namespaces, *folders}:
        if name.startswith(PREFIX) and not Path(f"/proc/{name.removeprefix(PREFIX).split('-')[0]}").exists():
            _remove(name)
            _remove_folders(name)


def _remove_folders(prefix):
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _remove(namespace):
    with suppress(CannotMakeNodes):
        for pid in ip("netns", "pids", namespace).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with suppress(CannotMakeNodes):
        ip("netns", "del", namespace)


class Network:
    """Context manager: the switch and `count` nodes that are up."""

    def __init__(self, count):
        self._prefix = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
        self.switch = f"{self._prefix}-switch"
        self.nodes = [Node(self, f"{self._prefix}-{number}", number + 1) for number in range(count)]
        self.outside = Node(self, f"{self._prefix}-outside", OUTSIDE, interfaces=(PUBLIC,))
        """A machine that is not of the cluster."""

    def __enter__(self):
        if os.getuid() != 0:
            raise CannotMakeNodes("needs root")
        if shutil.which("ip") is None:
            raise CannotMakeNodes("needs `ip` of iproute2: make cluster-tools")
        if Path(__file__).is_relative_to("/tmp") or Path(sys.prefix).is_relative_to("/tmp"):
            raise CannotMakeNodes("this checkout is in /tmp, and every node has its own: clone it to another folder")
        remove_leftovers()
        try:
            ip("netns", "add", self.switch)
            for bridge in SUBNETS:
                ip("-n", self.switch, "link", "add", bridge, "type", "bridge")
                ip("-n", self.switch, "link", "set", bridge, "up")
            for node in (*self.nodes, self.outside):
                node.connect()
                node.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for node in (*self.nodes, self.outside):
            node.kill()
            _remove(node.namespace)
        _remove(self.switch)
        _remove_folders(self._prefix)


class Node:
    """One machine. It can be killed and started again, then with an empty `/tmp`."""

    def __init__(self, network, namespace, host, interfaces=tuple(SUBNETS)):
        self._network = network
        self.namespace = namespace
        self._host = host
        self._interfaces = interfaces
        self._tmp = Path(tempfile.gettempdir()) / namespace
        """What is `/tmp` on the node."""
        self.folder = f"/tmp/node-{host}"
        """Working directory of commands; another one on each node."""
        self._init = None

    @property
    def address(self):
        """On the cluster's interface."""
        return f"{SUBNETS[CLUSTER]}.{self._host}"

    @property
    def public_address(self):
        return f"{SUBNETS[PUBLIC]}.{self._host}"

    def connect(self):
        ip("netns", "add", self.namespace)
        ip("-n", self.namespace, "link", "set", "lo", "up")
        for name in self._interfaces:
            plug = self._plug(name)
            ip("-n", self._network.switch, "link", "add", plug, "type", "veth", "peer", name, "netns", self.namespace)
            ip("-n", self._network.switch, "link", "set", plug, "master", name, "up")
            ip("-n", self.namespace, "address", "add", f"{SUBNETS[name]}.{self._host}/24", "dev", name)
            ip("-n", self.namespace, "link", "set", name, "up")

    def _plug(self, interface):
        """The end of its cable in the switch."""
        return f"{interface}{self._host}"

    # --- power and cables -------------------------------------------------------------------------------------------

    def start(self):
        if self._interfaces[0] == CLUSTER:
            self.restore()
        options = ["--mount", "--pid", "--ipc", "--fork", "--kill-child"]
        command = ["ip", "netns", "exec", self.namespace, "unshare", *options, sys.executable, "-I", "-S", "-c", INIT]
        command += [self._tmp, self.folder]
        shutil.rmtree(self._tmp, ignore_errors=True)
        self._tmp.mkdir(parents=True)
        self._init = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if self._init.stdout.readline() != "up\n":
            raise CannotMakeNodes(f"namespaces cannot be made: {self._init.stderr.read().strip()}")
        self._pid = int(Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()[0])

    def kill(self):
        """SIGKILL to all of its processes; the kernel closes their connections, which the others see at once."""
        if self._init is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._init.communicate()
            self._init = None

    def power_off(self):
        """As `kill`, but without a last packet to anybody."""
        self.cut()
        self.kill()

    def cut(self):
        """Pull the cable of the cluster's interface."""
        ip("-n", self._network.switch, "link", "set", self._plug(CLUSTER), "down")

    def restore(self):
        ip("-n", self._network.switch, "link", "set", self._plug(CLUSTER), "up")

    # --- commands ---------------------------------------------------------------------------------------------------

    def path(self, name=""):
        """A file of the node's working directory, as this process reaches it."""
        return self._tmp / Path(self.folder).name / name

    @property
    def shared_memory(self):
        """Its `/dev/shm`, as this process reaches it."""
        return Path(f"/proc/{self._pid}/root/dev/shm")

    def popen(self, *command, env=None, **options):
        """Start a command on this node."""
        enter = [
            "nsenter",
            f"--target={self._pid}",
            "--net",
            "--mount",
            "--pid",
            "--ipc",
            f"--wdns={self.folder}",
            "--",
        ]
        defaults = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_", "TMPDIR"))
        }
        return subprocess.Popen([*enter, *map(str, command)], env=inherited | (env or {}), **(defaults | options))

    def run(self, *command, env=None, timeout_s=RUN_S):
        """The standard output of a command on this node; a failure raises `AssertionError` with its output."""
        process = self.popen(*command, env=env)
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            signal_child(process, signal.SIGKILL)
            out, errors = process.communicate()
            raise AssertionError(f"{command} did not end within {timeout_s:g} s:\n{out}\n{errors}") from None
        assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{out}\n{errors}"
        return out

    def python(self, *arguments, **options):
        return self.run(sys.executable, *arguments, **options)


def signal_child(process, number):
    """Send a signal to the command of a `popen`, which `nsenter` waits for."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with suppress(OSError, IndexError):
        os.kill(int(children.read_text().split()[0]), number)


def wait_until(condition, seconds=60.0, pause_s=0.05):
    """Poll a condition that sends no notification; returns the first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause_s)
    return value
