"""The program of the keeper, process 1 of a sandbox, as machine code.

    become non-dumpable; ignore SIGCHLD; write "ready"; read a byte, or exit; close 0, 1 and 2; wait for ever

No file of the sandbox takes part: any of them, the shell, the dynamic linker and the libraries included, may be the
agent's, from a snapshot of what it did. The keeper is in no cgroup and behind no seccomp filter, so code of the agent
must not run as it, not even one instruction:
- the program is static, and in a sealed file in memory that bubblewrap inherits;
- its process is not dumpable, so processes of the same user can neither read nor write its memory (/proc/1/mem).

Ignoring SIGCHLD makes the kernel reap what is orphaned inside. If the supervisor dies before bubblewrap has asked to
die with it, the read ends, and with it the keeper.
"""

import fcntl
import os
import signal
import struct

from rollart.backends.sandboxes.launcher.syscalls import PR_SET_DUMPABLE

MACHINES = ("x86_64",)
"""As named by `uname`."""
READY = b"ready\n"
MFD_EXEC = 0x10
BASE = 0x400000
"""Address of the file in memory."""
HEADERS_BYTES = 64 + 56
READ, WRITE, CLOSE, SIGACTION, EXIT, PRCTL, PPOLL = 0, 1, 3, 13, 60, 157, 271
STACK = -1
"""As an argument: the address of memory that can be written to."""
IGNORE = struct.pack("<4Q", signal.SIG_IGN, 0, 0, 0)
"""What `rt_sigaction` takes."""


def open_program() -> int:
    """Descriptor of the program, to be inherited by who executes it."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create("keeper", flags | MFD_EXEC)
    except OSError:  # before Linux 6.3, where all of them can be executed
        descriptor = os.memfd_create("keeper", flags)
    os.write(descriptor, program())
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return descriptor


def program() -> bytes:
    """A static ELF file for x86_64: headers, data, code."""
    data = IGNORE + READY
    ignore = BASE + HEADERS_BYTES
    ready = ignore + len(IGNORE)
    wait = _call(PPOLL, 0, 0, 0, 0)
    begun = [*(_call(CLOSE, descriptor) for descriptor in range(3)), wait, b"\xeb", _byte(-len(wait) - 2)]  # jmp wait
    rest = b"".join(begun)
    code = [
        _call(PRCTL, PR_SET_DUMPABLE, 0),
        _call(SIGACTION, signal.SIGCHLD, ignore, 0, 8),
        _call(WRITE, 1, ready, len(READY)),
        _call(READ, 0, STACK, 1),
        b"\xff\xc8",  # dec eax
        b"\x75" + _byte(len(rest)),  # jnz beyond the rest
        rest,
        _call(EXIT, 1),
    ]
    return _headers(len(data), data + b"".join(code))


def _call(number: int, *arguments: int) -> bytes:
    """A system call; all arguments have 32 bits."""
    registers = (b"\xbf", b"\xbe", b"\xba", b"\x41\xba")  # mov edi, esi, edx, r10d
    code = [b"\xb8" + struct.pack("<I", number)]  # mov eax
    for register, value in zip(registers, arguments, strict=False):
        code.append(b"\x48\x89\xe6" if value == STACK else register + struct.pack("<I", value))  # mov rsi, rsp
    return b"".join([*code, b"\x0f\x05"])


def _byte(value: int) -> bytes:
    return struct.pack("b", value)


def _headers(data_bytes: int, content: bytes) -> bytes:
    entry = BASE + HEADERS_BYTES + data_bytes
    size = HEADERS_BYTES + len(content)
    ident = b"\x7fELF" + bytes([2, 1, 1]).ljust(12, b"\0")
    file = struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, entry, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    readable_and_executable = 5
    segment = struct.pack("<IIQQQQQQ", 1, readable_and_executable, 0, BASE, BASE, size, size, 0x1000)
    return ident + file + segment + content
