"""`report.html`: a run folder as one page that needs nothing else.

    journal ──► timeline, slots ─┐
    journal ──► audit, report ───┼─► data.PageData ──► html: template + style + script + the data as JSON
    metrics, trajectories ───────┘

What holds: every part is bounded, however long the run was; nothing of a run reaches the page but as text; a folder
whose run is unfinished or was killed has a page too.
"""
