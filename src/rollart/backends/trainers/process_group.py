"""The torch process group of a trainer's ranks: gloo on CPU, NCCL on CUDA, rendezvous at a TCP store of rank 0.

Neither the store nor gloo nor NCCL authenticates its peers. So they listen only on the interface of the address that a
rank is given: loopback within one machine, the cluster's network otherwise. That network must be trusted.

torch has one process group per process, hence one trainer with several ranks at a time.
"""

import array
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollart.ports.ranks import RankInfo
from rollart.types.errors import RequestError

COLLECTIVE_TIMEOUT_S = 600.0
"""Timeout for starting ranks, and for a live rank that does not take part in a collective."""
_SIOCGIFCONF = 0x8912
_INTERFACE_BYTES = 40
_MAX_INTERFACES = 512


class Membership:
    """This process's membership in the group."""

    def __init__(self, info: RankInfo, store: Store | None = None) -> None:
        """`store` is given on rank 0, which serves it."""
        self._info = info
        self._store = store
        self._sockets: dict[int, int] = {}
        """Descriptors opened while joining, with their inodes: a descriptor may be closed and used again."""

    def join(self) -> DeviceMesh:
        """Returns once all ranks have joined."""
        info = self._info
        device = torch.device("cuda", info.rank % torch.cuda.device_count()) if info.device == "cuda" else None
        if device is not None:
            torch.cuda.set_device(device)
        before = _open_sockets()
        with _bound_to(info.address):
            dist.init_process_group(
                "gloo" if device is None else "nccl",
                store=self._store or _store(info.rendezvous, info.ranks),
                rank=info.rank,
                world_size=info.ranks,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
                device_id=device,
            )
        self._sockets = {number: inode for number, inode in _open_sockets().items() if before.get(number) != inode}
        return init_device_mesh(info.device, (info.ranks,))

    def abort(self) -> None:
        """Make collectives in flight fail: a machine that vanished sends nothing, and they would wait for it."""
        if self._info.device == "cuda" and dist.group.WORLD is not None:
            dist.group.WORLD.abort()
        there = _open_sockets()
        for number, inode in self._sockets.items():  # gloo cannot be aborted
            if there.get(number) == inode:
                with suppress(OSError), socket.socket(fileno=os.dup(number)) as held:
                    held.getpeername()  # raises for a listening one, whose end gloo would not survive
                    held.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        self._sockets = {}
        self._store = None
        if dist.is_initialized():
            dist.destroy_process_group()


def serve_store(address: str, ranks: int) -> tuple[Store, int]:
    """Serve the store on this address only; returns it and its port."""
    listening = socket.create_server((address, 0))
    port: int = listening.getsockname()[1]
    return _store((address, port), ranks, listening.detach()), port


def _store(where: tuple[str, int], ranks: int, listening: int | None = None) -> Store:
    return TCPStore(
        *where,
        ranks,
        is_master=listening is not None,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


@contextmanager
def _bound_to(address: str) -> Iterator[None]:
    """gloo and NCCL listen on the interface of this address. They have no other setting for it."""
    own = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface_of(address))
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def interface_of(address: str) -> str:
    """Name of the network interface that has this IPv4 address.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    found = array.array("B", bytes(_INTERFACE_BYTES * _MAX_INTERFACES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        place, _ = found.buffer_info()
        filled = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iL", len(found), place)))[0]
    entries = bytes(found[:filled])
    for start in range(0, filled, _INTERFACE_BYTES):
        entry = entries[start : start + _INTERFACE_BYTES]
        if socket.inet_ntoa(entry[20:24]) == address:
            return entry[:16].split(b"\0", 1)[0].decode()
    raise RequestError(f"no interface of this machine has the IPv4 address {address}, which the ranks connect at")


def _open_sockets() -> dict[int, int]:
    """Descriptors of sockets, with their inodes."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # just closed
            about = entry.stat()
            if stat.S_ISSOCK(about.st_mode):
                found[int(entry.name)] = about.st_ino
    return found
