"""Conformance of engines: workers that handle `Add Abort EndSession Suspend Resume Stage Update`.

The cases make no assumption about the length of a turn (a simulated engine draws it) or how tokens are chosen; they
check what every engine guarantees whatever it samples.
"""

from rollart.conformance import engine_sessions, engine_turns, engine_updates
from rollart.conformance.case import Case
from rollart.conformance.engine_desk import EngineHarness

__all__ = ["CASES", "EngineHarness"]

CASES: tuple[Case[EngineHarness, None], ...] = (
    *engine_turns.SUITE.cases(),
    *engine_sessions.SUITE.cases(),
    *engine_updates.SUITE.cases(),
)
