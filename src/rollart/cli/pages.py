"""Large memory pages for a controller of thousands of agents.

It goes through its memory in no order, and a virtual machine pays dearly for every page that the processor has no
translation of: with pages of 4 kB that was a fifth of its time at 10,000 agents. glibc's malloc can ask for large ones,
Python's own allocator cannot. Both are chosen when the interpreter starts.
"""

import os
import platform
import sys
from collections.abc import Mapping

TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=60000"
"""Large pages; and blocks that were freed stay with the thread, instead of being merged and cut again: a tenth."""
MANY_AGENTS = 4096
"""From here on it is worth a restart."""


def large_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that an interpreter needs for them; the same where there are none or the user has chosen."""
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
    """Run this command again with large pages, unless it has them or there are none."""
    environ = large_pages(os.environ)
    if environ != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)
