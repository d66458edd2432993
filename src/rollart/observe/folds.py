"""State carried for events that were pruned from a journal: its audit and its report up to that point.

Both are folds whose state is plain data, so they can stop at any event, be saved, and continue: auditing and reporting
a pruned journal from there gives the same result as the whole journal.
"""

from typing import Any

import msgspec

from rollart.observe.audit import Auditor, Violation
from rollart.observe.formats import EventReader, stop_of_reason
from rollart.observe.report import Report, ReportFold
from rollart.types.errors import InvariantBroken, RequestError
from rollart.types.journal import JournalEvent

FORMAT = 6
"""Format of `encode`: to be raised with every change to the state of the folds."""
OLDEST = 2
"""Oldest format that `decode_folds` migrates."""


class Folds(msgspec.Struct):
    """Consumes a journal event by event."""

    auditor: Auditor = msgspec.field(default_factory=Auditor)
    report: ReportFold | None = msgspec.field(default_factory=ReportFold)
    """None once an event referred to something that was never started: an inconsistent journal has no report."""

    def take(self, event: JournalEvent) -> None:
        self.auditor.take(event)
        if self.report is not None:
            try:
                self.report.take(event)
            except KeyError:
                self.report = None

    def finish(self) -> tuple[list[Violation], Report | None]:
        """Result for the whole journal. The folds cannot be used afterwards."""
        violations = self.auditor.finish()
        if self.report is None and not violations:
            raise InvariantBroken(
                "the journal passes the audit, but no report can be made from it. "
                "This is a bug of rollart; keep the run folder and report it with the journal."
            )
        return violations, None if self.report is None else self.report.finish()

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode_folds(body: bytes, found: int = FORMAT) -> Folds:
    """Decode the output of `encode`, in format `found`."""
    if found > 2:  # fields that are new in formats 4 to 6 have their defaults
        return msgspec.msgpack.decode(body, type=Folds)
    return msgspec.convert(_from_2(msgspec.msgpack.decode(body)), Folds)


def check_format(found: int) -> None:
    """Refuse a format of the folds that this version of rollart cannot read."""
    if not OLDEST <= found <= FORMAT:
        raise RequestError(
            f"the pruned part of the journal is in format {found}, this version of rollart reads formats {OLDEST} to "
            f"{FORMAT}; use the version that wrote it, or start a new run in another folder"
        )


def _from_2(folds: dict[str, Any]) -> dict[str, Any]:
    """Migrate format 2: private fields of the auditor, claims without what they took, no `stop` in the report."""
    auditor = {name.removeprefix("_"): value for name, value in folds["auditor"].items()}
    auditor["claims"] = {claim: (claimed, claimed["groups"]) for claim, claimed in auditor["claims"].items()}
    if auditor["ended"] is not None:
        auditor["ended"] = EventReader(0).migrated(auditor["ended"])
    report = folds["report"]
    if report is not None and report["totals"]["ended"]:
        ended = report["totals"]["ended"]
        report["totals"]["stop"] = stop_of_reason("" if ended == "done" else ended)
    return {"auditor": auditor, "report": report}
