"""What is known of the events that a journal no longer holds: its audit and its report, as far as they got.

Both are folds whose state is plain data, so they can stop at any event, be written down, and go on: auditing and
reporting a pruned journal from here on gives what the whole journal would have given.
"""

import msgspec

from rollart.observe.audit import Auditor, Violation
from rollart.observe.report import Report, ReportFold
from rollart.types.errors import InvariantBroken, RequestError
from rollart.types.journal import JournalEvent

FORMAT = 2
"""Of what `encode` writes: to be raised with every change to what the folds remember."""


class Folds(msgspec.Struct):
    """Takes a journal event by event."""

    auditor: Auditor = msgspec.field(default_factory=Auditor)
    report: ReportFold | None = msgspec.field(default_factory=ReportFold)
    """None once an event was about something that was never started: a journal with holes has no figures."""

    def take(self, event: JournalEvent) -> None:
        self.auditor.take(event)
        if self.report is not None:
            try:
                self.report.take(event)
            except KeyError:
                self.report = None

    def finish(self) -> tuple[list[Violation], Report | None]:
        """What the whole journal comes to. The folds are used up."""
        violations = self.auditor.finish()
        if self.report is None and not violations:
            raise InvariantBroken(
                "the journal passes the audit and no report can be made of it. "
                "This is a bug of rollart; keep the run folder and report it with the journal."
            )
        return violations, None if self.report is None else self.report.finish()

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode_folds(body: bytes) -> Folds:
    """What `encode` wrote."""
    return msgspec.msgpack.decode(body, type=Folds)


def check_format(form: int) -> None:
    """Refuse what another version of the folds wrote."""
    if form != FORMAT:
        raise RequestError(
            f"the pruned part of the journal is in format {form}, this version of rollart reads format {FORMAT}; "
            "use the version that wrote it"
        )
