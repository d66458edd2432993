"""Runtimes: virtual, inline, Ray, and virtual over lossy links."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from other_python import other_python

from rollart.conformance.runtime import RuntimeHarness
from rollart.distributed.inline import InlineRuntime
from rollart.sim.faults import Injections
from rollart.sim.loop import run_virtual
from rollart.sim.lossy import LinkFaults, LossyRuntime
from rollart.sim.runtime import VirtualRuntime


def virtual_runtime(scratch: Path) -> RuntimeHarness:
    return RuntimeHarness(
        build=VirtualRuntime, run=run_virtual, scratch=scratch, within_s=60.0, quiet_s=10.0, threads=False
    )


def inline_runtime(scratch: Path) -> RuntimeHarness:
    return RuntimeHarness(build=InlineRuntime, run=asyncio.run, scratch=scratch, quiet_s=0.05)


def ray_runtime(scratch: Path) -> RuntimeHarness:
    """Needs the fixture `local_ray`. Workers are processes, which take a second to start, more on a busy machine."""
    from rollart.distributed.ray_runtime import RayRuntime  # late: where Ray is missing, the rest is still tested

    return RuntimeHarness(
        build=lambda: RayRuntime(scratch / "logs"),
        run=asyncio.run,
        scratch=scratch,
        within_s=60.0,
        quiet_s=0.3,
        python=other_python(scratch / "other-python"),
    )


def lossy_runtime(scratch: Path, faults: LinkFaults) -> RuntimeHarness:
    """Over a bad link an answer may take as long as several losses and a cut; so may what must not come."""
    return RuntimeHarness(
        build=lambda: LossyRuntime(faults, Injections()),
        run=run_virtual,
        scratch=scratch,
        within_s=120.0,
        quiet_s=30.0,
        threads=False,
    )


PERFECT_LINK = LinkFaults(seed=1, delay_s=0.0)
BAD_LINK = LinkFaults(seed=1, loss=0.2, double=0.1, delay_s=0.2, cut_s=5.0, cut_every_s=20.0)

RUNTIMES: dict[str, Callable[[Path], RuntimeHarness]] = {
    "virtual": virtual_runtime,
    "inline": inline_runtime,
    "ray": ray_runtime,
    "perfect-link": lambda scratch: lossy_runtime(scratch, PERFECT_LINK),
    "bad-link": lambda scratch: lossy_runtime(scratch, BAD_LINK),
}
