"""Stall watch: report what a run waits for when nothing moves, and stop it when nothing can move again."""

import asyncio

from rollart.control.context import Context
from rollart.types.errors import StalledRun
from rollart.types.journal import StallReported


class StallWatch:
    """Checks at fixed intervals whether the journal has grown.

    If not, it reports the open waits. All have deadlines, so either something moves at the next one or, with no wait
    open, nothing ever will: then the run ends with an error instead of hanging.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._timer: asyncio.TimerHandle | None = None
        self._seen = -1

    def start(self) -> None:
        context = self._context
        self._timer = context.call_at(context.now() + context.config.deadlines.stall_report_s, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        context = self._context
        if context.recorded == self._seen:
            waits = context.waits.report()
            context.record(StallReported(context.now(), tuple(waits)))
            if not waits:
                seconds = context.config.deadlines.stall_report_s
                context.nursery.fail(
                    StalledRun(
                        f"nothing has moved for {seconds:g} s and nothing is waited for: a wait without an owner. "
                        "This is a bug of rollart; report it with the journal."
                    )
                )
        self._seen = context.recorded
        self.start()
