"""The seccomp filter of commands: classic BPF over the number and arguments of a system call.

    wrong architecture, x32     → killed
    clone3                      → ENOSYS, so that libc falls back to clone, whose flags can be seen
    clone with namespace flags, sockets other than Unix, IP and route netlink, terminal injection → EPERM
    calls of `REFUSED`          → EPERM
    calls newer than this table → ENOSYS
    everything else             → allowed

It is a second line: without capabilities most of these calls fail anyway. It is the first one for kernel interfaces
that need no capability and are not separated by namespaces: keyrings, io_uring, userfaultfd, perf, vsock.
"""

import errno
import struct
from collections.abc import Iterable, Iterator

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, GREATER_EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`; the low half of an argument comes first on the machines of `TABLES`."""

REFUSED = {
    # name: (x86_64, aarch64); None where the machine does not have it
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "syslog": (103, 116),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "lookup_dcookie": (212, 18),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
    "create_module": (174, None),
    "get_kernel_syms": (177, None),
    "query_module": (178, None),
    "nfsservctl": (180, 42),
}
TABLES = {
    # machine: (AUDIT_ARCH, column, clone, clone3, ioctl, socket, socketpair)
    "x86_64": (0xC000003E, 0, 56, 435, 16, 41, 53),
    "aarch64": (0xC00000B7, 1, 220, 435, 29, 198, 199),
}
X32_BIT = 0x40000000
FIRST_UNKNOWN = 470
NAMESPACE_FLAGS = 0x7E020080
"""CLONE_NEW… of clone, time namespaces included."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
AF_NETLINK, NETLINK_ROUTE = 16, 0


def supported(machine: str) -> bool:
    return machine in TABLES


def program(machine: str) -> bytes:
    """The filter for a machine as named by `uname`: 8 bytes per instruction."""
    architecture, column, clone, clone3, ioctl, socket, socketpair = TABLES[machine]
    refused = [numbers[column] for numbers in REFUSED.values()]
    code = [
        _op(LOAD, ARCHITECTURE),
        *_unless(architecture, KILL),
        _op(LOAD, NUMBER),
        *_if(GREATER_EQUAL, X32_BIT, KILL),
        *_if(GREATER_EQUAL, FIRST_UNKNOWN, ERRNO | errno.ENOSYS),
        *_if(EQUAL, clone3, ERRNO | errno.ENOSYS),
    ]
    for number in sorted(number for number in refused if number is not None):
        code += _if(EQUAL, number, ERRNO | errno.EPERM)
    code += _for(clone, [_op(LOAD, ARGUMENTS), *_if(ANY_BIT, NAMESPACE_FLAGS, ERRNO | errno.EPERM)])
    injections = [part for request in (TIOCSTI, TIOCLINUX) for part in _if(EQUAL, request, ERRNO | errno.EPERM)]
    code += _for(ioctl, [_op(LOAD, ARGUMENTS + 8), *injections])
    for call in (socket, socketpair):
        code += _for(call, list(_families()))
    code.append(_op(RETURN, ALLOW))
    return b"".join(code)


def _families() -> Iterator[bytes]:
    yield _op(LOAD, ARGUMENTS)
    for family in FAMILIES:
        yield from _if(EQUAL, family, ALLOW)
    yield from _unless(AF_NETLINK, ERRNO | errno.EPERM)
    yield _op(LOAD, ARGUMENTS + 16)
    yield from _unless(NETLINK_ROUTE, ERRNO | errno.EPERM)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _if(test: int, value: int, verdict: int) -> list[bytes]:
    return [_op(test, value, 0, 1), _op(RETURN, verdict)]


def _unless(value: int, verdict: int) -> list[bytes]:
    return [_op(EQUAL, value, 1, 0), _op(RETURN, verdict)]


def _for(number: int, body: Iterable[bytes]) -> list[bytes]:
    """A test of the arguments of one call; afterwards the call is allowed. The number is loaded before and after."""
    inner = [*body, _op(RETURN, ALLOW)]
    return [_op(EQUAL, number, 0, len(inner)), *inner]
