"""`report.html`: a run folder as one self-contained page.

    journal ──► timeline, slots ─┐
    journal ──► audit, report ───┼─► data.PageData ──► html: template + style + script + the data as JSON
    metrics, trajectories ───────┘

Invariants: every part is bounded, however long the run was; data of the run reaches the page only as text; unfinished
and killed runs have a page too.
"""
