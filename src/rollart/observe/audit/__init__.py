"""The audit: does a journal keep the rules of the design, judged from the journal alone?

Nothing that the control plane computed is trusted: staleness, lags, shares, token counts and lineage are derived again
from the events below them and compared with what was recorded. One module per rule:

    run           rule 1  the run starts once, and so does every worker id
    conservation  rule 1  trajectories, groups and claims end once; only results are trained, each once
    prompts       rule 1  no prompt is skipped, passed over or lost
    lineage       rule 1  steps, checkpoints and roll-backs form one lineage; snapshots agree with it
    staleness     rule 2  0 ≤ served − first ≤ α at the claim, for everything whose tokens are trained
    admission     rule 2  no more groups in the making than can still be claimed within the bound
    shares        rule 3  whole groups, in the configured numbers unless a redistribution was recorded
    versions      rule 4  published before served, only growing, every token of a version that its engine had
    tokens        rule 5  what the turns sampled is what the trajectory holds
    waits         rule 6  every wait has an owner and every death an action
    liveness      rule 8  no longer from step to step than the bound that the run stated
    affinity      rule 9  automatic classes as the run says: recomputed, no flapping, no task left behind
    elasticity    rule 10 pools grow and shrink as the run says, follow their nodes, and removed engines drain

(Rule 7, determinism, is about two runs; the tests and `tools/same_journals.py` check it.)

`state` holds everything the audit remembers, as plain data; `auditor` streams the events to the checks. To change a
rule, edit its module; to add a check, write a function there and list it in `auditor.CHECKS`.
"""

from rollart.observe.audit.auditor import Auditor, audit
from rollart.observe.audit.state import MAX_LISTED, Violation

__all__ = ["MAX_LISTED", "Auditor", "Violation", "audit"]
