"""Conformance of engines: workers that speak `Add Abort EndSession Suspend Resume Stage Update`.

The cases know nothing of how long a turn becomes (a simulated engine draws that) nor of how tokens are chosen; they
check what every engine owes the controller whatever it samples.
"""

from rollart.ports.conformance import engine_sessions, engine_turns, engine_updates
from rollart.ports.conformance.case import Case
from rollart.ports.conformance.engine_desk import EngineHarness

__all__ = ["CASES", "EngineHarness"]

CASES: tuple[Case[EngineHarness, None], ...] = (
    *engine_turns.SUITE.cases(),
    *engine_sessions.SUITE.cases(),
    *engine_updates.SUITE.cases(),
)
