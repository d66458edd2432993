"""Huge pages for a controller with thousands of agents.

The controller accesses its memory at random, and TLB misses are expensive on virtual machines: with 4 kB pages they
took a fifth of its time at 10,000 agents. glibc's malloc can use huge pages, Python's own allocator cannot. Both are
chosen when the interpreter starts.
"""

import os
import platform
import sys
from collections.abc import Mapping

TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=60000"
"""Huge pages; and freed blocks stay in the thread cache instead of being merged and split again: a tenth faster."""
MANY_AGENTS = 4096
"""Number of agents from which a restart pays off."""


def large_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment for an interpreter with huge pages; unchanged if there are none or the user has set them."""
    libc, version = platform.libc_ver()
    if (
        sys.platform != "linux"
        or libc != "glibc"
        or tuple(map(int, version.split(".")[:2])) < (2, 35)
        or {"PYTHONMALLOC", "GLIBC_TUNABLES"} & environ.keys()
    ):
        return dict(environ)
    return {**environ, "PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": TUNABLES}


def restart_with_large_pages() -> None:
    """Re-execute this command with huge pages, unless it has them or there are none."""
    environ = large_pages(os.environ)
    if environ != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)
