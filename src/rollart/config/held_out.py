"""How much of a task's content is held out; a module of its own, because environments in other interpreters need it."""

HELD_OUT_SHARE = 0.25
"""Share of all contents, by hash."""
